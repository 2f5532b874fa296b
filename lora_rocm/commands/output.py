"""Output of commands. Only this module writes to the terminal.

A command computes a frozen dataclass, and ``Output.show`` prints it as text or, with ``--json``, as one JSON document.
``Output.notify`` prints progress and notices. With ``--json`` they go to standard error, so that standard output
contains only the document.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, TextIO

from lora_rocm.errors import LoraRocmError, Problem, RecipeError
from lora_rocm.foundation.colour import coloured_error, wants_colour
from lora_rocm.foundation.terminal_text import legible

Notify = Callable[[str], None]
"""Callback that receives a line of progress or a notice for the user."""


def unheard(text: str) -> None:
    """Ignore a notice. Used as ``Notify`` by callers who want only the result."""


class OutputMode(StrEnum):
    """Output modes of a command."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


@dataclass(frozen=True)
class Failure:
    """The error with which a command ends.

    Attributes:
        code: stable name of the error.
        what: what happened.
        where: file, line and key with the value, or another place.
        fix: how to fix it.
        exit_code: exit code of the command.
        problems: each problem of an invalid recipe.
    """

    code: str
    what: str
    where: str
    fix: str
    exit_code: int
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, error: LoraRocmError) -> Failure:
        """Return the ``Failure`` with an error's fields."""
        problems = tuple(error.problems) if isinstance(error, RecipeError) else ()
        return cls(error.code, error.what, error.where, error.fix, error.exit_code, problems)

    def __str__(self) -> str:
        if self.problems:
            return str(RecipeError(list(self.problems)))
        return str(LoraRocmError(self.code, self.what, where=self.where, fix=self.fix))


@dataclass(frozen=True)
class Failed:
    """The JSON document of a command that failed without a result.

    Attributes:
        error: the error.
    """

    error: Failure


@dataclass(frozen=True)
class ForgetResult:
    """Result of ``lora-rocm forget``. said: the mitigations that it has forgotten, as text."""

    said: tuple[str, ...]


def json_value(value: Any) -> Any:
    """Convert a value for JSON. Dataclasses become objects, paths and keys text, and numbers that are not finite null.

    Raises:
        TypeError: the value contains something that JSON cannot represent.
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
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class Output:
    """Prints the result of one command, its progress and its notices.

    ==========  ====================================  ===================
    mode        ``show`` (standard output)            ``notify``, progress
    ==========  ====================================  ===================
    HUMAN       text                                  standard output
    JSON        one document                          standard error
    QUIET       text                                  nowhere
    ==========  ====================================  ===================

    Errors and details (``--verbose``) go to standard error in every mode. In JSON mode, an error is also the document.

    Args:
        mode: the output mode.
        follows: in JSON mode, print events too, as one JSON object per line (``follow``).
        verbose: print details too: child processes, the log of training, error codes and times.
    """

    def __init__(self, mode: OutputMode = OutputMode.HUMAN, *, follows: bool = False, verbose: bool = False) -> None:
        self.mode, self._follows, self._has_document, self.verbose = mode, follows, False, verbose

    @property
    def stream(self) -> TextIO:
        """The stream for progress.

        It is read each time, because a command may keep running after standard output is gone.
        """
        match self.mode:
            case OutputMode.HUMAN:
                return sys.stdout
            case OutputMode.JSON:
                return sys.stderr
            case OutputMode.QUIET:
                return _Nowhere()

    def notify(self, *lines: str) -> None:
        """Print progress, or a notice for the user."""
        self.write("".join(legible(line, keep="\n") + "\n" for line in lines))

    def on_stderr(self, text: str) -> None:
        """Print a notice on standard error, even in text mode, so that only the result is redirected."""
        if self.mode != OutputMode.QUIET:
            _write(sys.stderr, legible(text, keep="\n") + "\n")

    def detail(self, text: str) -> None:
        """Print a line on standard error if details are asked for, in every mode."""
        if self.verbose:
            _write(sys.stderr, f"[lora-rocm] {legible(text)}\n")

    @contextmanager
    def details(self) -> Iterator[None]:
        """Print the log messages of the modules without torch, if details are asked for (``--verbose``)."""
        if not self.verbose:
            yield
            return
        import logging
        import platform

        from lora_rocm import __version__

        self.detail(f"lora-rocm {__version__}, Python {platform.python_version()}, {platform.platform()}")
        self.detail(f"folder {Path.cwd()}")

        class Handler(logging.Handler):
            def emit(_, record: logging.LogRecord) -> None:  # noqa: N805 - self is the output
                self.detail(record.getMessage())

        handler = Handler()
        log = logging.getLogger("lora_rocm")
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)

    def write(self, text: str) -> None:
        """Print a piece of text at once, unchanged and without a line end."""
        _write(self.stream, text)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Print an event as a JSON line. Does nothing unless in JSON mode with ``follows``."""
        if self._follows and self.mode == OutputMode.JSON:
            _write(sys.stdout, json.dumps(json_value(event)) + "\n")

    def show(self, result: Any, text: str, *, exact: bool = False) -> int:
        """Print the result. Return the exit code of its ``error``, or 0 if it has none.

        Args:
            result: the result, a dataclass.
            text: the result as text; if empty, nothing is printed in text mode.
            exact: whether the text is for another program, so that unusual characters are not escaped.
        """
        if self.mode == OutputMode.JSON:
            self.document(result)
        elif text:
            _write(sys.stdout, (text if exact else legible(text, keep="\n")) + "\n")
        failure = getattr(result, "error", None)
        if not isinstance(failure, Failure):
            return 0
        self._write_error(failure.code, str(failure))
        return failure.exit_code

    def fail(self, error: LoraRocmError) -> None:
        """Print the error with which the command ends.

        In JSON mode, also print it as the document if there is none yet.
        """
        self._write_error(error.code, str(error))
        if self.mode == OutputMode.JSON and not self._has_document:
            self.document(Failed(Failure.of(error)))

    def _write_error(self, code: str, text: str) -> None:
        if self.verbose:
            text += f"\n  code:  {code}"
        text = legible(text, keep="\n")
        _write(sys.stderr, (coloured_error(text) if wants_colour(sys.stderr) else text) + "\n")

    def document(self, value: Any) -> None:
        """Print a value as the JSON document, in ASCII: Windows PowerShell garbles other characters in a pipe."""
        self._has_document = True
        _write(sys.stdout, json.dumps(json_value(value), indent=None if self._follows else 1) + "\n")


class _Nowhere(io.StringIO):
    """A stream that discards its text."""

    def write(self, text: str, /) -> int:
        return len(text)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
