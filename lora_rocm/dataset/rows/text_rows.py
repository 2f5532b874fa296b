"""Reads the rows of a table of texts: JSON Lines, JSON, CSV, or a dataset of the ``datasets`` library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lora_rocm.dataset.rows import csv_rows
from lora_rocm.dataset.rows.csv_rows import MAX_ROW_BYTES, NOT_UTF8
from lora_rocm.dataset.rows.hf_datasets import opened
from lora_rocm.dataset.rows.records import Cells, UnusableText
from lora_rocm.dataset.sources.folders import shown, table_path
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.recipe.schema import ResolvedSource

NO_OBJECT = UnusableText("It is not a JSON object.", "Write one JSON object per row.")
MAX_ARRAY_BYTES = 1 << 30
CSV, PARQUET = ".csv", ".parquet"
Row = tuple[str, Mapping[str, Any] | UnusableText, int | None]
"""A row: its location, its cells and its position.

The location is for messages: file and line, or split and number. If the row cannot be used, the reason replaces its
cells. The position is for ``row_at``: a byte offset in JSON Lines and CSV files, or the row's number in a dataset of
the ``datasets`` library. If the table is one JSON array, its texts stay in memory, and the position is None.
"""


def rows_of(source: ResolvedSource) -> Iterator[Row]:
    """Yield every row of a source with the key ``dataset``. JSON Lines and CSV files are read row by row.

    Raises:
        DataError: there is no such dataset or split, or it cannot be read.
    """
    assert source.dataset is not None
    path = table_path(source.dataset)
    reader = READERS.get(path.suffix.lower())
    if os.path.isfile(path) and reader is None and path.suffix.lower() != PARQUET:
        raise DataError(
            "dataset-kind",
            f"This file type cannot be read as a table of texts: {path.suffix or 'no extension'}.",
            where=str(path),
            fix=f"Tables are {', '.join((*READERS, PARQUET))} files. For .txt files, set path to their folder.",
        )
    if reader is None or not os.path.isfile(path):
        for number, row in enumerate(opened(source.dataset, source.split)):
            yield f"{source.split}:{number}", without_nulls(row), number
        return
    try:
        with path.open("rb") as file:
            for line, row, offset in reader(file):
                yield f"{path.name}:{line}", row, offset
    except OSError as error:
        raise DataError(
            "dataset-unreadable",
            f"The table cannot be read: {shown(error)}",
            where=str(path),
            fix="Repair or replace the file.",
        ) from error


def row_at(source: ResolvedSource, position: int) -> Cells:
    """Return the cells of one row of a source with the key ``dataset``. ``position``: see ``Row``.

    Raises:
        OSError, ValueError, LookupError, UnusableText: there is no such row.
        DataError: the ``datasets`` library cannot open the dataset.
    """
    assert source.dataset is not None
    path = table_path(source.dataset)
    if path.suffix.lower() not in READERS or os.path.isdir(path):
        return without_nulls(opened(source.dataset, source.split)[position])
    if path.suffix.lower() == CSV:
        return csv_rows.row_at(path, position)
    with path.open("rb") as file:
        file.seek(position)
        found: Cells = parse_json(file.readline(MAX_ROW_BYTES + 1).decode("utf-8-sig"))
    return found


def without_nulls(row: Mapping[str, Any]) -> Cells:
    """Remove the keys with null values from the mappings in a row's cells.

    In Arrow, all mappings of a column have the same keys. Arrow adds null for the keys that a mapping lacks. Such a
    null looks like one that the user wrote. Columns that are null and list elements that are null stay.
    """
    return {column: _without_nulls(cell) for column, cell in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def unit_of_position(source: ResolvedSource) -> str:
    """Return the unit of the source's row positions: "byte" or "row" (see ``Row``)."""
    return "byte" if table_path(source.dataset or "").suffix.lower() in READERS else "row"


Numbered = Iterator[tuple[int, Mapping[str, Any] | UnusableText, int | None]]


def _json_rows(file: BinaryIO) -> Numbered:
    """Yield (number, row, byte offset) for each row of JSON Lines or of one JSON array.

    If a row cannot be used, the reason replaces it. The number counts lines, or elements of the array. The offset is
    None for an array.
    """
    if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        found = _parsed(read_plain(Path(file.name), MAX_ARRAY_BYTES), list)
        rows = [found] if isinstance(found, UnusableText) else found
        for number, row in enumerate(rows, 1):
            yield number, row if isinstance(row, dict | UnusableText) else NO_OBJECT, None
        return
    file.seek(0)
    number = offset = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            yield number, UnusableText(f"The line is longer than {MAX_ROW_BYTES >> 20} MiB.", "Split it."), None
            while line and not line.endswith(b"\n"):
                offset += len(line)
                line = file.readline(MAX_ROW_BYTES)
        elif line.strip():
            yield number, _parsed(line, dict), offset
        offset += len(line)


def _parsed(content: bytes, kind: type[Any]) -> Any:
    """Return the parsed JSON, or the reason why it cannot be used. ``kind``: the expected type."""
    try:
        found = parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return NOT_UTF8
    except BadJson as error:
        return UnusableText(error.sentence, "Repair the line.")
    return found if isinstance(found, kind) else NO_OBJECT


READERS: Mapping[str, Callable[[BinaryIO], Numbered]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    CSV: csv_rows.rows_in,
}
