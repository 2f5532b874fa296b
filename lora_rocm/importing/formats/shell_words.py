"""Splits a shell script, batch file or PowerShell script into commands and words. Nothing is executed.

It is more tolerant than a shell: a quotation mark or bracket that is not closed ends with the text. Words in brackets,
``$(...)`` and quotation marks are read as commands too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

Shell = Literal["sh", "bat", "ps1"]
INNER = "\0"
"""Replaces each variable and each command in the text of a word."""
MAX_LEVELS = 12
"""Brackets and quotation marks in one another; deeper ones are letters of the word."""
JOINED: dict[Shell, str] = {"sh": "\\", "bat": "^", "ps1": "`"}
"""The letter at the end of a line that continues; before another letter, it removes that letter's meaning."""
VARIABLE: dict[Shell, re.Pattern[str]] = {
    "sh": re.compile(r"\$(\w+|[@*#?!-])"),
    "bat": re.compile(r"%{1,2}~?(\w+)(?::[^%\n]*)?%?|!(\w+)(?::[^!\n]*)?!"),
    "ps1": re.compile(r"\$(?:\w+:)?(\w+|\{[^}\n]*\})", re.IGNORECASE),
}
EXPANSION = re.compile(r"\$\{[!#]?(?:env:)?(\w+|[@*#?!-])(\[[^\]}\n]*\])?:?([-+=?#%/^,@:~]*)")
"""Matches the begin of ``${name}``, ``${name[@]}`` and ``${name:-value}``."""
REDIRECTION = re.compile(r"(<<<|<<-?|<(?!\()|&?>>?\|?(?:&(?=\d))?)[ \t]*")
PRINTERS = re.compile(
    r"echo|printf|cat|tee|base64|tr|sed|awk|grep|jq|cut|head|tail|set|export|declare|local|readonly|env|type|more"
    r"|write-(?:output|host)|get-content",
    re.IGNORECASE,
)
"""Matches commands that do not print their own name."""
HERE_NAME = re.compile(r"(['\"\\]?)([^\s'\"<>|;&()]+)\1")
END = re.compile(r"[ \t]*(\|\||&&|\|&?|[\n;&])")


@dataclass
class ShellWord:
    """A word of a command.

    Attributes:
        text: the word without quotation marks; INNER replaces each variable and command.
        names: variables in it, also in its commands.
        inner: commands in its brackets.
        defaults: variables with the words that they get by an expansion such as ``${name:-value}``.
        is_quoted: whether it begins with a quotation mark.
        is_list: whether it stands for several words, as ``${args[@]}`` does.
    """

    text: str = ""
    names: list[str] = field(default_factory=list)
    inner: list[ShellCommand] = field(default_factory=list)
    defaults: list[tuple[str, list[ShellWord]]] = field(default_factory=list)
    is_quoted: bool = False
    is_list: bool = False

    def after(self, text: str, *, at_end: bool = False) -> ShellWord:
        """Return the word from a text on, or with only this text (``at_end``). Names and commands are kept."""
        rest = text if at_end else self.text.partition(text)[2] if text else self.text.partition(INNER)[2]
        return replace(self, text=rest, names=[*self.names], inner=[*self.inner])


@dataclass
class ShellCommand:
    """A command of a script.

    Attributes:
        words: its words.
        inputs: texts of its here-strings and here-documents.
        outputs: files that it writes to.
        pipe: its pipeline.
        num_before: number of words in ``pipe`` that the commands before it print.
        outer: the command with the brackets around it.
        is_quoted: whether it is part of a quoted text.
    """

    words: list[ShellWord] = field(default_factory=list)
    inputs: list[ShellWord] = field(default_factory=list)
    outputs: list[ShellWord] = field(default_factory=list)
    pipe: Pipe = field(default_factory=lambda: Pipe())
    num_before: int = 0
    outer: ShellCommand | None = None
    is_quoted: bool = False

    @property
    def output(self) -> list[ShellWord]:
        """Words that it may print: those after its name, and the texts that it reads."""
        words = self.words
        has_name = bool(words) and not words[0].is_quoted and (len(words) > 1 or PRINTERS.fullmatch(words[0].text))
        return [*(words[1:] if has_name else words), *self.inputs]


@dataclass
class Pipe:
    """Words that the commands of a pipeline may print, in their order."""

    words: list[ShellWord] = field(default_factory=list)


def commands_of(text: str, shell: Shell) -> list[ShellCommand]:
    """Return all commands of a script, also those in brackets and quotation marks."""
    return _Reader(text, shell, 0).script("")


class _Reader:
    """Reads a text once from its begin to its end. Quoted texts are read again as commands."""

    def __init__(self, text: str, shell: Shell, level: int) -> None:
        self._text, self._shell, self._level, self._at = text.replace("\r\n", "\n"), shell, level, 0
        self._is_quoted = level > 0
        self._quotes = "\"'" if shell != "bat" else '"'
        self._waiting = list[tuple[ShellWord, str]]()  # here-documents that begin at the next line
        self.all: list[ShellCommand] = []
        """Commands in the order in which they begin."""
        self._current: ShellCommand | None = None

    def script(self, closer: str) -> list[ShellCommand]:
        """Read all, and return the commands with those inside their words."""
        self._group(closer)
        return self.all

    def _group(self, closer: str) -> list[ShellCommand]:
        """Read commands up to a closing letter, and return them."""
        found, outer = list[ShellCommand](), self._current
        command = self._begin(outer, None)
        self._level += 1
        while self._at < len(self._text):
            letter = self._text[self._at]
            if closer and letter == closer:
                self._at += 1
                break
            ended = END.match(self._text, self._at)
            if ended is not None and self._ends(ended[1]):
                self._at = ended.end()
                found.append(command)
                command = self._begin(outer, command if ended[1] in ("|", "|&") else None)
                if ended[1] == "\n":
                    self._here_documents()
            else:
                self._part(command, letter, closer)
        self._level -= 1
        self._current = outer
        return [*found, command]

    def _begin(self, outer: ShellCommand | None, before: ShellCommand | None) -> ShellCommand:
        """Begin a command. ``before``: the command that prints into it."""
        self._current = command = ShellCommand(is_quoted=self._is_quoted, outer=outer)
        if before is not None:
            command.pipe = before.pipe
            command.pipe.words += before.output
            command.num_before = len(command.pipe.words)
        self.all.append(command)
        return command

    def _ends(self, sign: str) -> bool:
        return not (sign == "&" and self._text[self._at : self._at + 2] == "&>")

    def _part(self, command: ShellCommand, letter: str, closer: str) -> None:
        """Read a blank, a comment, a redirection or a word."""
        redirection = REDIRECTION.match(self._text, self._at)
        if letter in " \t{})]" or (letter == "," and (self._shell == "ps1" or self._is_quoted)):
            self._at += 1
        elif letter == "#" and self._shell != "bat":
            end = self._text.find("\n", self._at)
            self._at = end if end >= 0 else len(self._text)
        elif redirection is not None:
            self._redirect(command, redirection, closer)
        else:
            command.words.append(self._word(closer))

    def _redirect(self, command: ShellCommand, found: re.Match[str], closer: str) -> None:
        self._at = found.end()
        sign = found[1]
        if sign in ("<<", "<<-"):
            if (name := HERE_NAME.match(self._text, self._at)) is not None:
                command.inputs.append(document := ShellWord())
                self._waiting.append((document, name[2]))
                self._at = name.end()
        elif self._at < len(self._text) and self._text[self._at] != "\n":
            before = self._at
            word = self._word(closer)
            self._at = max(self._at, before + 1)
            if sign == "<<<":
                command.inputs.append(word)
            elif ">" in sign:
                command.outputs.append(word)

    def _here_documents(self) -> None:
        """Read the bodies of the here-documents that the line before has begun."""
        for document, name in self._waiting:
            begin, pattern = self._at, re.compile(rf"^[ \t]*{re.escape(name)}[ \t]*$", re.MULTILINE)
            end = pattern.search(self._text, begin)
            body = self._text[begin : end.start() if end else len(self._text)]
            self._at = end.end() if end else len(self._text)
            inner = self._again(body)
            lines = [ShellWord(line.strip()) for line in body.split("\n") if line.strip()]
            document.inner += [ShellCommand(inputs=lines), *inner]
            document.names += [name for each in inner for word in each.words for name in word.names]
        self._waiting.clear()

    def _word(self, closer: str) -> ShellWord:
        """Read a word with everything in its brackets and quotation marks."""
        word = ShellWord(is_quoted=self._text[self._at : self._at + 1] in tuple(self._quotes))
        begin = self._at
        while self._at < len(self._text):
            letter = self._text[self._at]
            blank = " \t\n;&|<>{})" + ("," if self._shell == "ps1" or self._is_quoted else "")
            is_inner = self._text.startswith(("<(", ">("), self._at)
            if letter == closer or (letter in blank and not is_inner):
                break
            if not self._special(word, letter):
                word.text += letter
                self._at += 1
        if self._at == begin:
            self._at += 1
        return word

    def _special(self, word: ShellWord, letter: str) -> bool:
        """Read a part that is more than one letter; return whether there is one."""
        if letter == JOINED[self._shell]:
            after = self._text[self._at + 1 : self._at + 2]
            word.text += "" if after == "\n" else after
            self._at += 2
            return True
        if letter in self._quotes:
            self._quoted(word, letter)
            return True
        if self._text.startswith(("$'", '$"'), self._at):
            self._at += 1
            return True
        return self._expanded(word)

    def _quoted(self, word: ShellWord, mark: str) -> None:
        """Read a quoted text as a part of the word, and again as commands. Only ``"`` has expansions inside."""
        self._at += 1
        begin, is_plain = self._at, mark == "'"
        while self._at < len(self._text) and self._text[self._at] != mark:
            letter = self._text[self._at]
            if not is_plain and letter == JOINED[self._shell]:
                word.text += self._text[self._at + 1 : self._at + 2].strip("\n")
                self._at += 2
            elif is_plain or not self._expanded(word, in_quotes=True):
                word.text += letter
                self._at += 1
        self._again(self._text[begin : self._at])
        self._at += 1

    def _again(self, text: str) -> list[ShellCommand]:
        """Read a quoted text as commands."""
        if self._level >= MAX_LEVELS or not re.search(r"\s|[=:(]", text):
            return []
        found = _Reader(text, self._shell, self._level + 1).script("")
        self.all += found
        return found

    def _expanded(self, word: ShellWord, in_quotes: bool = False) -> bool:
        """Read a variable, an expansion or commands in brackets; return whether there is one."""
        begins = {"sh": ("$(", "<(", ">(", "`"), "bat": (), "ps1": ("$(",)}[self._shell]
        opening = next((each for each in begins if self._text.startswith(each, self._at)), "")
        opening = opening or ("(" if not in_quotes and self._text[self._at] == "(" else "")
        if opening and self._level < MAX_LEVELS:
            self._at += len(opening)
            word.text += INNER
            self._inside(word, "`" if opening == "`" else ")")
            return True
        expansion = EXPANSION.match(self._text, self._at) if self._shell == "sh" else None
        if expansion is not None and self._level < MAX_LEVELS:
            self._default(word, expansion)
            return True
        variable = VARIABLE[self._shell].match(self._text, self._at)
        if variable is None:
            return False
        self._at = variable.end()
        word.text += INNER
        word.names.append(next(filter(None, variable.groups())).strip("{}"))
        return True

    def _inside(self, word: ShellWord, closer: str) -> list[ShellCommand]:
        """Read the commands of a bracket; they are a part of the word."""
        commands = self._group(closer)
        commands = [each for each in commands if each.words or each.inputs]
        word.inner += commands
        word.names += [name for each in commands for part in (*each.words, *each.inputs) for name in part.names]
        return commands

    def _default(self, word: ShellWord, expansion: re.Match[str]) -> None:
        """Read ``${name:-value}``. The message of ``${name:?message}`` is a value only if it is one word."""
        self._at = expansion.end()
        word.text += INNER
        word.names.append(expansion[1])
        word.is_list |= expansion[2] in ("[@]", "[*]")
        inner = ShellWord()
        values = [part for each in self._inside(inner, "}") for part in each.words]
        if "/" in expansion[3]:  # ${name/pattern/value}
            inner.inner += [ShellCommand(words=[value.after("/") for value in values[:1]])]
        if expansion[3] == "?" and len(values) > 1:
            return
        word.inner += inner.inner
        word.names += inner.names
        word.defaults += [*inner.defaults, (expansion[1], values)]
