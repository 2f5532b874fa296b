"""A text that stays in its file: a table holds where it is, and how it can be known again.

Hundreds of megabytes of conversations take no memory then. A text that is read later, for encoding or repair, has to be
the one that was found.
"""

from __future__ import annotations

import csv
import hashlib
import json

from lora_rocm.dataset import records
from lora_rocm.dataset.records import UnusableText
from lora_rocm.dataset.text_rows import row_at, unit_of_place
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import ResolvedSource

REFERENCE, ROW = records.MARK + "@", records.MARK + "["
"""First characters of a reference, and of several texts in one row; no record begins so."""


def reference(text: str, place: int, part: int | None, pairs: bool = False) -> str:
    """What stands for a text in a table.

    Args:
        text: a record as one string.
        place: of its row (``text_rows.Row``).
        part: its number, if the record of the row was cut into several (``records.part``).
        pairs: as in ``records.record_of``.
    """
    return REFERENCE + json.dumps([place, part, pairs, _digest(text)])


def joined(stored: list[str]) -> str:
    """Several texts or references as one string."""
    return records.MARK + json.dumps(stored, ensure_ascii=False)


def separated(stored: str) -> list[str]:
    """The texts in a string from ``joined``; any other string is one."""
    if not stored.startswith(ROW):
        return [stored]
    found: list[str] = json.loads(stored[len(records.MARK) :])
    return found


def resolved(stored: str, source: ResolvedSource) -> str:
    """The text that is stored, or that a reference to a row of a source stands for.

    Raises:
        DataError: text-changed, or the file cannot be read.
    """
    if stored.startswith(ROW):
        return joined([resolved(each, source) for each in separated(stored)])
    if not stored.startswith(REFERENCE):
        return stored
    place, part, pairs, digest = json.loads(stored[len(REFERENCE) :])
    try:
        record = records.record_of(row_at(source, place), pairs)
        text = records.written(record if part is None else records.part(record, part))
        same = _digest(text) == digest
    except (OSError, ValueError, LookupError, csv.Error, UnusableText):
        same = False
    if not same:
        raise DataError(
            "text-changed",
            "This file was changed while it was in use: a text is not there any more.",
            where=f"{source.dataset}, {unit_of_place(source)} {place}",
            fix="Put the file back as it was, or start the run again.",
        )
    return text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
