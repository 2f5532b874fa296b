"""Reads the options of a command line from a shell script, batch file or PowerShell script. Nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lora_rocm.importing.formats.shell_secrets import shell_secrets
from lora_rocm.importing.formats.shell_words import JOINED, Shell
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value, names_secret

ASSIGNMENT: dict[Shell, re.Pattern[str]] = {
    "sh": re.compile(r"^\s*(?:export\s+)?(\w+)=(.*)$"),
    "bat": re.compile(r"^\s*set\s+\"?(\w+)=(.*?)\"?\s*$", re.IGNORECASE),
    "ps1": re.compile(r"^\s*\$(?:env:)?(\w+)\s*=\s*(.*)$", re.IGNORECASE),
}
VARIABLE: dict[Shell, re.Pattern[str]] = {
    "sh": re.compile(r"\$\{?(\w+)\}?"),
    "bat": re.compile(r"%(\w+)%"),
    "ps1": re.compile(r"\$(?:env:)?\{?(\w+)\}?", re.IGNORECASE),
}
ASSIGNED_BEFORE = re.compile(r"""(\s*(?:export\s+)?\w+=(?:"[^"]*"|'[^']*'|[^\s;&|"'()]*))\s*(?:;|&&)\s*(?=\S)""")
"""Matches an assignment that precedes a command in its line."""
COMMENT: dict[Shell, re.Pattern[str]] = {
    "sh": re.compile(r"^\s*#"),
    "bat": re.compile(r"^\s*(?:@?rem\b|::)", re.IGNORECASE),
    "ps1": re.compile(r"^\s*#"),
}
SHELLS: dict[str, Shell] = {".sh": "sh", ".bash": "sh", ".bat": "bat", ".cmd": "bat", ".ps1": "ps1"}
OPTION = re.compile(r"--?[A-Za-z][\w.-]*$")
UNSET = re.compile(r"\$\{?\w|%\w+%|\$\(|^@\w+$")
"""Matches a variable or command that is left in a word because its value is unknown."""
SEVERAL = re.compile(r"\$\{\w+\[@\]\}$|@\w+$|\$\w*(?:args|options|params)$", re.IGNORECASE)
"""Matches a shell variable that holds a list of words: ``${args[@]}``, ``@args``, ``$ext_args``."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?$")


def shell_of(path: Path) -> Shell | None:
    """Return the shell for a script's suffix, or None if the file is not a script."""
    return SHELLS.get(path.suffix.lower())


def command_settings(text: str, file: str, program: re.Pattern[str], shell: Shell) -> FileContent:
    """Return the options of the first command line that runs ``program``, with variables replaced by their values.

    An option without a value is true, and an option with several values is a list. Options before the program
    belong to a launcher such as ``accelerate launch``; their keys are in the section ``launcher``.

    Args:
        text: text of the script.
        file: name of the file, stored in the settings.
        program: pattern of the word that names the training program. If the pattern has groups, the last group is
        the name.
        shell: shell of the script, which determines the syntax.
    """
    found, variables, is_done, commands = FileContent(), dict[str, str](), False, list[str]()
    for number, line in _whole_lines(text, shell):
        if COMMENT[shell].match(line):
            continue
        commands.append(_replaced(line, variables, shell))
        assigned = ASSIGNMENT[shell].match(line)
        value = _assigned(_replaced(assigned[2], variables, shell), shell) if assigned is not None else None
        named = program.search(line)
        if assigned is not None and value is None and named is not None and shell == "ps1":
            value = named[named.lastindex or 0]
            found.unread.append(UnreadText(file, number, f"sets {assigned[1]} by an expression; {value} is taken"))
        if assigned is not None and (value is not None or named is None):
            found.unread += _assign(variables, assigned[1].lower(), value, UnreadText(file, number, assigned[1]), line)
            continue
        command = _replaced(line, variables, shell)
        if not program.search(command):
            continue
        if is_done:
            found.unread.append(UnreadText(file, number, "is a further command; import it from another file"))
            continue
        is_done = True
        try:
            words = _words(command, shell)
        except ValueError:  # an open quotation mark
            found.unread.append(UnreadText(file, number, "has an open quotation mark"))
            words = command.split()
        found.extend(options_of(words, file, _LineOf(text, number), program))
    found.secrets += _spellings(shell_secrets(text, shell, file) | shell_secrets("\n".join(commands), shell, file))
    if not is_done:
        found.unread.append(UnreadText(file, 0, "has no command line of the training program"))
    return found


def _assign(variables: dict[str, str], name: str, value: str | None, place: UnreadText, line: str) -> list[UnreadText]:
    """Set a variable.

    Conditions are not evaluated: if a variable is set in a conditional block, it keeps its first value.
    """
    is_conditional = line[:1].isspace() and variables.get(name, value) != value
    if is_conditional:
        return [
            UnreadText(place.file, place.line, f"sets {place.why} again under a condition; the first value is taken")
        ]
    variables.pop(name, None)
    variables |= {} if value is None else {name: value}
    return []


def options_of(words: list[str], file: str, line_of: _LineOf, program: re.Pattern[str] | None = None) -> FileContent:
    """Return the options among the words of a command line (see ``command_settings``)."""
    found, launcher, at = FileContent(), program is not None, 0
    while at < len(words):
        word = words[at]
        at += 1
        if program is not None and program.search(word):
            launcher = False
            continue
        name, equals, value = word.partition("=")
        if not OPTION.match(name):
            if not launcher and UNSET.search(word):
                found.unread.append(
                    UnreadText(file, line_of(word), f"{word} holds options that the file does not write")
                )
            continue
        values = [value] if equals else []
        while not equals and at < len(words) and not _is_option(words[at]) and not SEVERAL.match(words[at]):
            if launcher and (values or (program is not None and program.search(words[at]))):
                break
            values.append(words[at])
            at += 1
        line, key = line_of(name), name.lstrip("-")
        found.secrets += _spellings(values) if names_secret(key) else ()
        unknown = next((text for text in values if UNSET.search(text)), None)
        if unknown is not None:
            found.unread.append(
                UnreadText(file, line, f"--{key} has the value of a variable that the file does not set")
            )
            continue
        parsed: list[Value] = [_value(text) for text in values]
        content: Value = True if not parsed else parsed[0] if len(parsed) == 1 else parsed
        found.settings.append(Setting(f"launcher.{key}" if launcher else key, content, file, line))
    return found


def assignments(words: Sequence[str], file: str) -> FileContent:
    """Return settings for words such as NAME=VALUE. A name may have indices, as in ``datasets[0].resolution``."""
    found = FileContent()
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if name and equals:
            found.secrets += _spellings([value]) if names_secret(name) else ()
            found.settings.append(Setting(name, _value(value), file))
        else:
            found.unread.append(UnreadText(file, 0, f"{word} is not NAME=VALUE"))
    return found


def _spellings(words: Iterable[str]) -> Iterator[Value]:
    """Yield words as written and as parsed: 0071 becomes 71."""
    for word in words:
        yield from (word, _value(word))


def _is_option(word: str) -> bool:
    return OPTION.match(word.partition("=")[0]) is not None


class _LineOf:
    """Finds the line number of an option in a command that extends over several lines."""

    def __init__(self, text: str = "", first: int = 0) -> None:
        self._lines, self._first = text.splitlines(), first

    def __call__(self, option: str) -> int:
        pattern = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
        lines = enumerate(self._lines[max(self._first - 1, 0) :], self._first)
        return next((number for number, line in lines if pattern.search(line)), self._first)


NO_LINES = _LineOf()


def _whole_lines(text: str, shell: Shell) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, command), with continued lines joined.

    A line that begins with an option counts as a continuation.
    """
    parts: list[str] = []
    first, is_open = 1, False
    for number, line in enumerate(text.splitlines(), 1):
        if parts and not is_open and not line.lstrip().startswith("--"):
            yield first, " ".join(parts)
            parts = []
        if not parts:
            first = number
        while not parts and shell == "sh" and (assigned := ASSIGNED_BEFORE.match(line)) is not None:
            yield number, assigned[1]
            line = line[assigned.end() :]
        stripped = line.rstrip()
        is_open = stripped.endswith(JOINED[shell])
        parts.append(stripped[:-1] if is_open else line)
    if parts:
        yield first, " ".join(parts)


def _replaced(text: str, variables: Mapping[str, str], shell: Shell) -> str:
    return VARIABLE[shell].sub(lambda found: variables.get(found[1].lower(), found[0]), text)


def _assigned(text: str, shell: Shell) -> str | None:
    """Return the value of an assignment, or None for an expression, which is not evaluated."""
    if shell == "bat":
        return _without_quotes(text.strip())
    if shell == "sh":
        try:
            words = shlex.split(text.partition(";")[0], comments=True)
        except ValueError:  # an open quotation mark
            return None
        return words[0] if len(words) == 1 and not words[0].startswith("(") else None
    found = re.match(r"""\s*("[^"]*"|'[^']*'|[^\s;#"'(@+]+)\s*(?:[;#]|$)""", text)
    return _without_quotes(found[1]) if found is not None else None


def _words(line: str, shell: Shell) -> list[str]:
    if shell == "sh":
        return shlex.split(line, comments=True)
    return [_without_quotes(word) for word in re.findall(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+", line)]


def _without_quotes(word: str) -> str:
    """Return a word without the quotation marks around it or around its value."""
    found = re.match(r"^([^\"']*=)?([\"'])(.*)\2$", word)
    return (found[1] or "") + found[3] if found else word


def _value(text: str) -> Value:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if NUMBER.match(text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)
    return text
