"""Confines exceptions to one row: a row that fails is skipped, and never ends a check or a run.

Reading, rendering, encoding and cutting a row call foreign code (methods of the row's values, a chat template, a
tokenizer), which may raise anything. All of this runs inside ``row_edge``, which raises only ``UnusableText``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.errors import DataError, LoraRocmError

MAX_REASON_LETTERS = 200
Shared = Callable[[str], DataError]
"""Function that gets the reason of one failed row. It returns the error to raise if all rows fail."""


class SharedCause(UnusableText):
    """A row that cannot be used because of the chat template or the tokenizer, which all rows share.

    Attributes:
        of_all: the error to raise if no row can be used and most rows fail for this reason.
    """

    def __init__(self, what: str, fix: str, of_all: DataError) -> None:
        super().__init__(what, fix)
        self.of_all = of_all


def fails_for_all(part: Literal["chat template", "tokenizer"], model: str) -> Shared:
    """Return a function that builds the error for the case that a part of the model fails for all rows.

    Args:
        part: the failing part.
        model: the model's name in the error.
    """

    def made(reason: str) -> DataError:
        return DataError(
            f"{part.replace(' ', '-')}-fails",
            f"The {part} fails for all rows. The first failure: {reason}",
            where=f"{part} of {model}",
            fix=f"Set model.tokenizer to a tokenizer with a different {part}, or change the messages of all rows."
            if part == "chat template"
            else "Download the tokenizer's files again, or set model.tokenizer to a different tokenizer.",
        )

    return made


def is_of_a_row(error: BaseException) -> bool:
    """Whether a row may have caused an exception. Errors of this program, Ctrl-C and the like have other causes.

    The tokenizers library raises panics because of rows; they are included although they are not an ``Exception``.
    """
    if type(error).__name__ == "PanicException":
        return True
    return isinstance(error, Exception) and not isinstance(error, LoraRocmError)


@contextmanager
def row_edge(what: str, fix: str, shared: Shared | None = None) -> Iterator[None]:
    """Context manager that converts exceptions caused by one row to ``UnusableText``.

    Args:
        what: the failure ("The row cannot be read").
        fix: the remedy for the user.
        shared: builds the error for the case that all rows fail; None if the rows do not share a possible cause.
    """
    try:
        yield
    except UnusableText:
        raise
    except BaseException as error:  # edge: a library may raise anything for a row
        if not is_of_a_row(error):
            raise
        reason = f"{what}: {reason_of(error)}."
        raise UnusableText(reason, fix) if shared is None else SharedCause(reason, fix, shared(reason)) from error


def reason_of(error: BaseException) -> str:
    """Return an exception's type and message as one short line."""
    said = " ".join(str(error).split()).rstrip(".")
    kind = "" if type(error) is Exception else type(error).__name__
    return ": ".join(filter(None, (kind, said)))[:MAX_REASON_LETTERS]
