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

NO_OBJECT = UnusableText("It is not a JSON object.", "Give one object per row.")
MAX_ARRAY_BYTES = 1 << 30
CSV, PARQUET = ".csv", ".parquet"
Row = tuple[str, Mapping[str, Any] | UnusableText, int | None]
"""A row: its place for messages (file and line, or split and number), its cells or the reason why it has none, and its
position for ``row_at``. The position is the byte at which it begins in a file of JSON Lines or CSV, or its number in a
dataset of the ``datasets`` library. None: the table is one JSON array; its texts stay in memory."""


def rows_of(source: ResolvedSource) -> Iterator[Row]:
    """Every row of a source with ``dataset``. JSON Lines and CSV are streamed.

    Raises:
        DataError: there is no such dataset or split, or it cannot be read.
    """
    assert source.dataset is not None
    path = table_path(source.dataset)
    reader = READERS.get(path.suffix.lower())
    if os.path.isfile(path) and reader is None and path.suffix.lower() != PARQUET:
        raise DataError(
            "dataset-kind",
            f"Texts are not read from a {path.suffix or 'nameless'} file.",
            where=str(path),
            fix=f"Tables are {', '.join((*READERS, PARQUET))} files. For .txt files, give their folder as path.",
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
            fix="Repair the file, or give another.",
        ) from error


def row_at(source: ResolvedSource, position: int) -> Cells:
    """The cells of a row of a source with ``dataset``. ``position``: see ``Row``.

    Raises:
        OSError, ValueError, LookupError, UnusableText: there is no such row.
        DataError: the ``datasets`` library cannot open it.
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
    """A row of an Arrow table without the null keys of the mappings in its cells.

    Arrow stores mappings of one column with the keys of all of them, and null where a mapping does not have a key. A
    null that the user wrote looks the same. Null columns and null elements of lists stay.
    """
    return {column: _without_nulls(cell) for column, cell in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def unit_of_position(source: ResolvedSource) -> str:
    """The unit of positions in a source (``Row``)."""
    return "byte" if table_path(source.dataset or "").suffix.lower() in READERS else "row"


Numbered = Iterator[tuple[int, Mapping[str, Any] | UnusableText, int | None]]


def _json_rows(file: BinaryIO) -> Numbered:
    """Rows of JSON Lines, or of one JSON array."""
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
    """The value in JSON, or the reason why it cannot be used."""
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
