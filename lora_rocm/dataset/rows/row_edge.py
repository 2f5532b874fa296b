"""The edge of a row: an exception of one row skips that row, and never ends a check or a run.

Reading, rendering, encoding and cutting a row call foreign code (the row's own values, a chat template, a tokenizer),
which may raise anything. All of it runs inside ``row_edge``, which raises only ``UnusableText``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.errors import DataError, LoraRocmError

MAX_REASON_LETTERS = 200
Shared = Callable[[str], DataError]
"""Builds the error for all rows from a reason."""


class SharedCause(UnusableText):
    """A row that cannot be used because of something that all rows share: the chat template or the tokenizer.

    Attributes:
        of_all: the error that names it, if most rows fail alike and none can be used.
    """

    def __init__(self, what: str, fix: str, of_all: DataError) -> None:
        super().__init__(what, fix)
        self.of_all = of_all


def fails_for_all(part: Literal["chat template", "tokenizer"], model: str) -> Shared:
    """Return a function that builds the error for all rows, for a failing part of the model that all rows share.

    Args:
        part: the failing part.
        model: the model's name, for messages.
    """

    def made(reason: str) -> DataError:
        return DataError(
            f"{part.replace(' ', '-')}-fails",
            f"The {part} works for none of the rows. The first failure: {reason}",
            where=f"{part} of {model}",
            fix=f"Give a tokenizer with another {part} (model.tokenizer), or change the messages of all rows."
            if part == "chat template"
            else "Download the tokenizer's files again, or give another one (model.tokenizer).",
        )

    return made


def is_of_a_row(error: BaseException) -> bool:
    """Whether a row may be the cause of an exception. Errors of this program, Ctrl-C and the like have other causes.

    A row may cause a panic of the tokenizers library, although that is not an ``Exception``.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not isinstance(error, LoraRocmError)


@contextmanager
def row_edge(what: str, fix: str, shared: Shared | None = None) -> Iterator[None]:
    """Turn the exceptions of one row into ``UnusableText``.

    Args:
        what: the failure ("The row cannot be read").
        fix: the remedy for the user.
        shared: builds the error that names a shared cause, if all rows may share the cause.
    """
    try:
        yield
    except UnusableText:
        raise
    except BaseException as error:
        if not is_of_a_row(error):
            raise
        reason = f"{what}: {reason_of(error)}."
        raise UnusableText(reason, fix) if shared is None else SharedCause(reason, fix, shared(reason)) from error


def reason_of(error: BaseException) -> str:
    """An exception as one short line."""
    said = " ".join(str(error).split()).rstrip(".")
    kind = "" if type(error) is Exception else type(error).__name__
    return ": ".join(filter(None, (kind, said)))[:MAX_REASON_LETTERS]
