"""References to texts that stay in their file. A table stores only a text's position and digest.

So hundreds of megabytes of conversations take no memory. The digest detects a change of the text between the scan and
a later read for encoding or repair.
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
"""Prefixes of stored strings that are a reference (``REFERENCE``) or several texts of one row (``ROW``). Records never
begin with them.
"""


def reference(text: str, position: int, part: int | None, pairs: bool = False) -> str:
    """Return the string that a table stores as a reference to a text.

    Args:
        text: the record as one string.
        position: position of its row (``text_rows.Row``).
        part: number of the text if the row's record was cut into several (``records.part``), else None.
        pairs: whether the row is read as a pair of answers, as in ``records.record_of``.
    """
    return REFERENCE + json.dumps([position, part, pairs, _digest(text)])


def joined(stored: list[str]) -> str:
    """Join several texts or references into one string, which ``separated`` splits."""
    return records.MARK + json.dumps(stored, ensure_ascii=False)


def separated(stored: str) -> list[str]:
    """Return the texts of a string from ``joined``. Any other string is returned as the only element."""
    if not stored.startswith(ROW):
        return [stored]
    found: list[str] = json.loads(stored[len(records.MARK) :])  # json: a record that this process made
    return found


def resolved(stored: str, source: ResolvedSource) -> str:
    """Return the text for a stored string. If the string is a reference, the text is read from the source.

    Raises:
        DataError: the text has changed or is missing ("text-changed"), or the dataset cannot be opened.
    """
    if stored.startswith(ROW):
        return joined([resolved(each, source) for each in separated(stored)])
    if not stored.startswith(REFERENCE):
        return stored
    position, part, pairs, digest = json.loads(stored[len(REFERENCE) :])  # json: a record that this process made
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
    """Describe how the data changed. For a file, its current size and time help the user to recognise the change."""
    if unit_of_position(source) == "row":  # a folder or the hub
        return "this row is missing or has different text"
    try:
        found = table_path(source.dataset or "").stat()
    except OSError:
        return "the file no longer exists"
    changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
    return f"the file has {found.st_size} bytes, last written {changed}, and this row is missing or has different text"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
