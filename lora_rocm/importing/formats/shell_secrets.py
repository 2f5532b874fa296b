"""Finds the secrets of a shell script, batch file or PowerShell script. Nothing is executed.

A secret may reach a program by an option, a variable with a default, an array, the output of a command, a pipe, a
here-document or a loop. So this module follows data, and evaluates nothing: it records which words may reach which
variable. Each literal text that may reach a secret name or a login is a secret. It finds too many rather than too few.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from lora_rocm.errors import UserError
from lora_rocm.importing.formats.shell_words import INNER, Pipe, Shell, ShellCommand, ShellWord, commands_of
from lora_rocm.importing.setting import names_secret

GIVEN = re.compile(
    rf"(?:-{{0,2}}|.*[\[({{\"'{INNER}.])(?:\$?env:)?([\w-]+(?:\[\w*)?)[\]\"')]*(?:\+=|:=|=|:(?!//))(.*)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches NAME=VALUE, --name=value, "name":value and array[name]=value."""
SIGNS = ("=", "+=", ":=", "??=", ":")
"""Words between a name and its value."""
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
NAME = re.compile(r"(?:\$?env:)?([A-Za-z_][\w-]*)", re.IGNORECASE)
SETTERS = re.compile(r"setx|printf|typeset|set-(?:item|variable)|new-(?:item|variable)|set|setenv|read", re.IGNORECASE)
"""Matches commands that take a variable's name and its value as words."""
LOGIN = re.compile(r"(?:.*\.)?login", re.IGNORECASE)
READS_SECRET = re.compile(r"-+(?:\w+-)*(?:stdin|with-token)", re.IGNORECASE)
"""Matches options of programs that read a secret from their standard input."""
INPUT, SECRET = "<", "!"
"""Names under which everything is recorded that a command may read from its standard input, and every secret."""
READERS = ("read", "mapfile", "readarray", "read-host")
ARGUMENTS = frozenset("0123456789@*#")
"""Names of a function's arguments."""
LONG_PART_LETTERS = 8
MAX_LETTERS = 1 << 18
_is_secret = lru_cache(names_secret)


@dataclass
class _Reaching:
    """Literal texts that a variable may have, and the names of variables in its value."""

    texts: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def add(self, words: Iterable[ShellWord]) -> None:
        for word in words:
            self.texts.update(_texts(word))
            self.names.update(name.lower() for name in word.names)


def shell_secrets(text: str, shell: Shell, file: str) -> set[str]:
    """Return each literal text of a script that may reach a secret name or a login.

    Args:
        text: text of the script, or of one command.
        shell: shell of the script, which determines the syntax.
        file: name of the file, for the error.

    Raises:
        UserError: the text is too long for a script.
    """
    if len(text) > MAX_LETTERS:
        what = f"The script has more than {MAX_LETTERS:,} letters, so it does not start a training."
        raise UserError("import-unreadable", what, where=file, fix="Give the script that starts the trainer.")
    flow = _Flow(shell)
    for command in commands_of(text, shell):
        flow.add(command)
    return flow.secrets()


class _Flow:
    """Which words may reach which variable, and which words reach a secret name or a login."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._of_name: defaultdict[str, _Reaching] = defaultdict(_Reaching)
        self._secret = _Reaching()
        self._functions = dict[str, tuple[str, ...]]()
        self._read = dict[tuple[str, int], tuple[str, Pipe, int]]()

    def add(self, command: ShellCommand) -> None:
        """Record a command of the script."""
        words = command.words
        self._of_name[INPUT].add(command.inputs)
        for word in words:
            for name, values in word.defaults:
                self._give(name, values)
        self._given_by_signs(command)
        self._given_by_options(words)
        self._given_by_loops(command)
        self._given_to_functions(words)
        self._given_to_programs(command)

    def secrets(self) -> set[str]:
        """Return the texts that reach a secret, directly or by other variables."""
        for name, pipe, number in self._read.values():
            (self._secret if name == SECRET else self._of_name[name]).add(pipe.words[:number])
        found, waiting, seen = set(self._secret.texts), set(self._secret.names), set[str]()
        waiting.update(text.lower() for text in found if text.lower() in self._of_name)  # a name in a variable
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self._of_name:
                continue
            seen.add(name)
            values = self._of_name[name]
            found |= values.texts
            waiting |= values.names | {text.lower() for text in values.texts if text.lower() in self._of_name}
        return found - {""}

    def _give(self, name: str, words: Sequence[ShellWord]) -> None:
        """Record that words may reach a variable, a key or an option of this name."""
        self._of_name[name.lower()].add(words)
        if _is_secret(name):
            self._secret.add(words)

    def _enters(self, name: str, command: ShellCommand) -> None:
        """Record that a name gets all that may enter a command: its inputs, and the inputs of commands around it."""
        around: ShellCommand | None = command
        while around is not None:
            (self._secret if name == SECRET else self._of_name[name]).add(around.inputs)
            known = self._read.get((name, id(around.pipe)), (name, around.pipe, 0))
            self._read[name, id(around.pipe)] = (name, around.pipe, max(known[2], around.num_before))
            around = around.outer

    def _given_by_signs(self, command: ShellCommand) -> None:
        """NAME=VALUE, NAME = VALUE, "name": value."""
        words = command.words
        signs = [number for number, word in enumerate(words) if number and (word.text in SIGNS or word.text[:1] == "=")]
        for number, end in zip(signs, [*signs[1:], len(words)], strict=False):  # a chain a = b = c is followed by names
            values = words[number : number + 2] if words[number].text == ":" else words[number:end]
            for name in _names(words[number - 1]):
                self._give(name, [values[0].after("="), *values[1:]])
        is_set = bool(words) and self._shell == "bat" and words[0].text.lower() == "set"
        for number, word in enumerate(words):
            found = GIVEN.fullmatch(word.text)
            if word.text.startswith(f"{INNER}=") and word.names:  # $name="value"
                self._give(word.names[0], [word.after("=")])
            elif found is not None:
                values = [word.after(found[2], at_end=True)]
                if is_set or (not found[2] and (word.text.endswith(":") or command.is_quoted or self._shell != "sh")):
                    values += words[number + 1 :] if is_set else words[number + 1 : number + 2]
                    is_set = False  # blanks belong to the value of the first variable
                self._give(found[1].rpartition("[")[2], values)

    def _given_by_options(self, words: Sequence[ShellWord]) -> None:
        """``--name value``, and "NAME" "value" as arguments of a call."""
        for number, word in enumerate(words):
            name = word.text.lstrip("-")
            if word.text.startswith("-") and _is_secret(name):
                values = list[ShellWord]()
                for value in words[number + 1 :]:
                    if OPTION.fullmatch(value.text.partition("=")[0]) or value.is_list or (values and value.names):
                        break
                    values.append(value)
                self._give(name, values)
        for number, word in enumerate(words):
            found = NAME.fullmatch(word.text) if word.is_quoted or SETTERS.fullmatch(words[0].text) else None
            if found is not None and _is_secret(found[1]):
                self._give(found[1], words[number + 1 :])
                break  # all words after it are secret

    def _given_by_loops(self, command: ShellCommand) -> None:
        """``for NAME in``, ``read NAME`` and ``printf -v NAME``."""
        words = command.words
        texts = [word.text.lower() for word in words]
        if "in" in texts[1:]:
            number = texts.index("in", 1)
            end = texts.index("do", number) if "do" in texts[number:] else len(words)
            for name in _names(words[number - 1]):
                self._give(name, words[number + 1 : end])
        reader = next((number for number, text in enumerate(texts) if text in READERS), None)
        if reader is not None:
            self._enters(INPUT, command)
            for word in words[reader + 1 :]:
                self._give(word.text, [ShellWord(names=[INPUT])])
        if texts[:2] == ["printf", "-v"] and len(words) > 2:
            self._give(words[2].text, words[3:])

    def _given_to_functions(self, words: Sequence[ShellWord]) -> None:
        """Arguments of the script's own functions, of ``call`` and of ``set --``."""
        first = words[0].text if words else ""
        defined = words[1] if first.lower() == "function" and len(words) > 1 else words[0] if words else ShellWord()
        if first.lower() == "function" or (first.endswith(INNER) and not words[0].inner and first != INNER):
            self._functions[defined.text.removesuffix(INNER).lower()] = tuple(defined.names)
        is_call = first.lower() == "call" or [word.text for word in words[:2]] == ["set", "--"]
        if is_call or first.lower() in self._functions:
            for name in (*ARGUMENTS, *self._functions.get(first.lower(), ())):
                self._give(name, words[1:])

    def _given_to_programs(self, command: ShellCommand) -> None:
        """Logins, and files and standard inputs that take a secret."""
        words = command.words
        logins = [number for number, word in enumerate(words) if LOGIN.fullmatch(word.text.partition(INNER)[0])]
        for number in logins[:1]:
            self._secret.add([words[number].after("")])
            self._secret.add(word for word in words[number + 1 :] if not OPTION.fullmatch(word.text))
        takes_secret = any(READS_SECRET.fullmatch(word.text) for word in words)
        passes_on = any(word.text in ("xargs", "parallel") for word in words) and any(
            _is_secret(name) for word in words for name in NAME.findall(word.text)
        )
        is_tee = bool(words) and words[0].text in ("tee", "Out-File", "Set-Content", "sudo")
        into = [*command.outputs, *(words[1:] if is_tee else ())]
        if any(_is_secret(_stem(word.text)) for word in into):
            self._secret.add(command.output)
            self._enters(SECRET, command)
        elif logins or takes_secret or passes_on:
            self._enters(SECRET, command)


def _names(word: ShellWord) -> list[str]:
    """Return the names in a word before a sign: variables, a bare name, or the last index."""
    return [*word.names, *re.findall(r"([A-Za-z_][\w-]*)[\])\"']*$", word.text)]


def _stem(path: str) -> str:
    return re.split(r"[\\/]", path)[-1].strip(".").partition(".")[0]


def _texts(word: ShellWord) -> Iterator[str]:
    """Yield the literal texts of a word, with and without punctuation, and its long parts."""
    for piece in word.text.split(INNER):
        yield piece
        yield (bare := piece.strip("()[]{}'\"`,;:"))
        parts = re.split(r"[\s,]+", bare)
        if len(parts) > 1:
            yield from (part for part in parts if len(part) >= LONG_PART_LETTERS or re.search(r"\d", part))
    for command in word.inner:
        for each in command.output:
            yield from _texts(each)
