"""Reads the rows of a table of texts: JSON Lines, JSON, CSV, or what the ``datasets`` library opens."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lora_rocm.dataset.folders import shown, table_path
from lora_rocm.dataset.hf_datasets import opened
from lora_rocm.dataset.records import Cells, UnusableText
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.recipe.schema import ResolvedSource

MAX_ARRAY_BYTES, MAX_ROW_BYTES = 1 << 30, 1 << 24
CSV = ".csv"
Row = tuple[str, Mapping[str, Any] | UnusableText, int | None]
"""The row's place, for people; its cells or why it has none; and where it stays (``row_at``): the byte at which it
begins in a file of JSON Lines or CSV, or its number in what the ``datasets`` library opens. None: in memory."""
NOT_UTF8 = UnusableText("It is not UTF-8 text.", "Save the file as UTF-8.")
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
OPEN_QUOTE = UnusableText(
    "A quote that opens in this row is never closed.", 'Close it, or double it: a quote is written "".'
)
MANY_CELLS = UnusableText("It has more cells than the table has columns.", "Put quotes around cells with commas.")


def rows_of(source: ResolvedSource) -> Iterator[Row]:
    """Every row of a source with ``dataset``. JSON Lines and CSV are streamed.

    Raises:
        DataError: there is no such dataset or split, or it cannot be read.
    """
    assert source.dataset is not None
    path = table_path(source.dataset)
    reader = READERS.get(path.suffix.lower())
    if reader is None or not os.path.isfile(path):
        for number, row in enumerate(opened(source.dataset, source.split)):
            yield f"{source.split}:{number}", row, number
        return
    try:
        with path.open("rb") as file:
            for line, row, offset in reader(file):
                yield f"{path.name}:{line}", row, offset
    except (OSError, csv.Error) as error:
        raise DataError(
            "dataset-unreadable",
            f"The table cannot be read: {shown(error)}",
            where=str(path),
            fix="Repair the file, or give another.",
        ) from error


def row_at(source: ResolvedSource, place: int) -> Cells:
    """The cells of a row of a source with ``dataset``. ``place``: see ``Row``.

    Raises:
        OSError, ValueError, LookupError, csv.Error: there is no such row.
        DataError: the ``datasets`` library cannot open it.
    """
    assert source.dataset is not None
    path = table_path(source.dataset)
    if path.suffix.lower() not in READERS or os.path.isdir(path):
        cells: Cells = opened(source.dataset, source.split)[place]
        return cells
    with path.open("rb") as file:
        if path.suffix.lower() != CSV:
            file.seek(place)
            found: Cells = json.loads(file.readline(MAX_ROW_BYTES + 1).decode("utf-8-sig"))
            return found
        csv.field_size_limit(MAX_ROW_BYTES)
        columns = next(csv.reader(_text_lines(file)))
        file.seek(place)
        for row in csv.DictReader(_text_lines(file), columns):
            return row
    raise LookupError(f"no row at byte {place}")


def unit_of_place(source: ResolvedSource) -> str:
    """What places of a source (``Row``) count."""
    return "byte" if table_path(source.dataset or "").suffix.lower() in READERS else "row"


Numbered = Iterator[tuple[int, Mapping[str, Any] | UnusableText, int | None]]


def _json_rows(file: BinaryIO) -> Numbered:
    """Rows of JSON Lines, or of one JSON array."""
    if file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        found = _parsed(read_plain(Path(file.name), MAX_ARRAY_BYTES), list)
        rows = [found] if isinstance(found, UnusableText) else found
        yield from ((number, row, None) for number, row in enumerate(rows, 1))
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
    """The value in JSON, or why it is none."""
    try:
        found = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return NOT_UTF8
    except (ValueError, RecursionError) as error:
        return UnusableText(f"It is no JSON: {error}.", "Repair the line.")
    wanted = "object" if kind is dict else "array"
    return found if isinstance(found, kind) else UnusableText(f"It is no JSON {wanted}.", "Give one object per row.")


def _csv_rows(file: BinaryIO) -> Numbered:
    """Rows of a table whose first line names its columns."""
    if file.read(2) in UTF16_MARKS:
        yield 1, NOT_UTF8, None
        return
    file.seek(0)
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.DictReader(_text_lines(file))
    if reader.fieldnames is None:
        return
    size_bytes, begin, line = os.fstat(file.fileno()).st_size, file.tell(), reader.line_num + 1
    for row in reader:
        end = file.tell()  # the reader takes no line before it needs it
        if end >= size_bytes and _is_open(file, begin):
            yield line, OPEN_QUOTE, begin
        elif any("\udc80" <= letter <= "\udcff" for cell in row.values() for letter in str(cell)):
            yield reader.line_num, NOT_UTF8, begin
        else:
            yield reader.line_num, MANY_CELLS if any(row.get(None) or ()) else row, begin
        begin, line = end, reader.line_num + 1


def _is_open(file: BinaryIO, begin: int) -> bool:
    """Whether the last row, which begins at a byte, has a quote that is never closed. Leaves the file at its end."""
    file.seek(begin)
    try:
        for _ in csv.reader(_text_lines(file), strict=True):
            pass
    except csv.Error as error:
        file.seek(0, os.SEEK_END)
        return "end of data" in str(error)
    return False


def _text_lines(file: BinaryIO) -> Iterator[str]:
    for line in file:
        yield line.decode("utf-8-sig", "surrogateescape")


READERS: Mapping[str, Callable[[BinaryIO], Numbered]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    CSV: _csv_rows,
}
