"""A text that stays in its file: a table stores only its position and its digest.

So hundreds of megabytes of conversations take no memory. The digest proves that a text that is read later, for encoding
or repair, has not changed.
"""

from __future__ import annotations

import hashlib
import json
import time

from lora_rocm.dataset.rows import records
from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.dataset.rows.text_rows import row_at, unit_of_position
from lora_rocm.dataset.sources.folders import table_path
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import ResolvedSource

REFERENCE, ROW = records.MARK + "@", records.MARK + "["
"""First characters of a reference, and of several texts in one row; no record begins with them."""


def reference(text: str, position: int, part: int | None, pairs: bool = False) -> str:
    """The reference to a text, as a table stores it.

    Args:
        text: a record as one string.
        position: position of its row (``text_rows.Row``).
        part: its number, if the record of the row was cut into several (``records.part``).
        pairs: as in ``records.record_of``.
    """
    return REFERENCE + json.dumps([position, part, pairs, _digest(text)])


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
    """The stored text, or the text behind a reference to a row of a source.

    Raises:
        DataError: text-changed, or the file cannot be read.
    """
    if stored.startswith(ROW):
        return joined([resolved(each, source) for each in separated(stored)])
    if not stored.startswith(REFERENCE):
        return stored
    position, part, pairs, digest = json.loads(stored[len(REFERENCE) :])
    try:
        record = records.record_of(row_at(source, position), pairs)
        text = records.written(record if part is None else records.part(record, part))
        same = _digest(text) == digest
    except (OSError, ValueError, LookupError, UnusableText):
        same = False
    if not same:
        raise DataError(
            "text-changed",
            f"The data changed while they were in use: {_change(source)}.",
            where=f"{source.dataset}, {unit_of_position(source)} {position}",
            fix="Restore the data, or start the run again.",
        )
    return text


def _change(source: ResolvedSource) -> str:
    """A description of a change, with the present size and time of a file, which the user may recognise."""
    if unit_of_position(source) == "row":  # a folder or the hub
        return "this row is missing or has another text"
    try:
        found = table_path(source.dataset or "").stat()
    except OSError:
        return "the file no longer exists"
    changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
    return f"the file has {found.st_size} bytes, last written {changed}, and this row is missing or has another text"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
