"""What commands print, and how: the only place that writes to the terminal.

A command computes a frozen dataclass; ``Output.show`` prints it as text or, with ``--json``, as one JSON document. What
happens on the way is said by ``Output.say``, so that standard output holds nothing but that document.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, TextIO

from lora_rocm.errors import LoraRocmError, Problem, RecipeError
from lora_rocm.foundation.terminal_text import legible

Say = Callable[[str], None]
"""Takes a line about what is going on, or about what the user should know."""


def unheard(text: str) -> None:
    """A ``Say`` for callers who want the result alone."""


class OutputMode(StrEnum):
    """How a command prints."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


@dataclass(frozen=True)
class Failure:
    """The error with which a command ends.

    Attributes:
        code: its stable name.
        what: what happened.
        where: file, line and key with the value, or another place.
        fix: what to do about it.
        exit_code: of the command.
        problems: each problem of a recipe.
    """

    code: str
    what: str
    where: str
    fix: str
    exit_code: int
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, error: LoraRocmError) -> Failure:
        """The failure of an error."""
        problems = tuple(error.problems) if isinstance(error, RecipeError) else ()
        return cls(error.code, error.what, error.where, error.fix, error.exit_code, problems)

    def __str__(self) -> str:
        if self.problems:
            return str(RecipeError(list(self.problems)))
        return str(LoraRocmError(self.code, self.what, where=self.where, fix=self.fix))


@dataclass(frozen=True)
class Failed:
    """The document of a command that has no result.

    Attributes:
        error: why.
    """

    error: Failure


@dataclass(frozen=True)
class ReportResult:
    """What ``lora-rocm report`` wrote. report: the page."""

    report: Path


@dataclass(frozen=True)
class ForgetResult:
    """What ``lora-rocm forget`` did. said: which mitigations it has forgotten, in words."""

    said: tuple[str, ...]


def json_form(value: Any) -> Any:
    """The value as JSON has it: every field of a dataclass, paths and keys as text, null for numbers not finite.

    Raises:
        TypeError: a value has no form in JSON.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_form(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_form(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


class Output:
    """Prints the result of one command, and what it says on the way.

    ==========  ====================================  ===================
    mode        ``show`` (standard output)            ``say``, progress
    ==========  ====================================  ===================
    HUMAN       text                                  standard output
    JSON        one document                          standard error
    QUIET       text                                  nowhere
    ==========  ====================================  ===================

    Errors go to standard error in every mode; in JSON mode they are also the document.

    Args:
        mode: how to print.
        follows: in JSON mode, what happens on the way is printed too, as one JSON object per line (``follow``).
    """

    def __init__(self, mode: OutputMode = OutputMode.HUMAN, *, follows: bool = False) -> None:
        self.mode, self._follows, self._has_document = mode, follows, False

    @property
    def stream(self) -> TextIO:
        """Where progress is shown. Looked up each time, because a command may outlive its standard output."""
        match self.mode:
            case OutputMode.HUMAN:
                return sys.stdout
            case OutputMode.JSON:
                return sys.stderr
            case OutputMode.QUIET:
                return _Nowhere()

    def say(self, *lines: str) -> None:
        """Say what is going on, or what the user should know."""
        self.write("".join(legible(line, keep="\n") + "\n" for line in lines))

    def aside(self, text: str) -> None:
        """Say something on standard error, also where the result is text: that can then be redirected alone."""
        if self.mode != OutputMode.QUIET:
            _write(sys.stderr, legible(text, keep="\n") + "\n")

    def write(self, text: str) -> None:
        """Show a piece of text letter for letter as it comes, without a line end."""
        _write(self.stream, text)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Print an event as a JSON line, in JSON mode of a command that ``follows``."""
        if self._follows and self.mode == OutputMode.JSON:
            _write(sys.stdout, json.dumps(json_form(event)) + "\n")

    def show(self, result: Any, text: str, *, exact: bool = False) -> int:
        """Print the result and return the exit code: that of its ``error``, if it has one, else 0.

        Args:
            result: a dataclass.
            text: the same in words; nothing is printed if it is empty.
            exact: the text is for another program, so unusual characters are not escaped.
        """
        if self.mode == OutputMode.JSON:
            self.document(result)
        elif text:
            _write(sys.stdout, (text if exact else legible(text, keep="\n")) + "\n")
        failure = getattr(result, "error", None)
        if not isinstance(failure, Failure):
            return 0
        _write(sys.stderr, legible(str(failure), keep="\n") + "\n")
        return failure.exit_code

    def fail(self, error: LoraRocmError) -> None:
        """Print the error with which the command ends. A document that was already printed stays the only one."""
        _write(sys.stderr, legible(str(error), keep="\n") + "\n")
        if self.mode == OutputMode.JSON and not self._has_document:
            self.document(Failed(Failure.of(error)))

    def document(self, value: Any) -> None:
        """Print a value as the one JSON document. ASCII only: Windows PowerShell garbles other characters in a pipe."""
        self._has_document = True
        _write(sys.stdout, json.dumps(json_form(value), indent=None if self._follows else 1) + "\n")


class _Nowhere(io.StringIO):
    """A stream that keeps nothing."""

    def write(self, text: str, /) -> int:
        return len(text)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
