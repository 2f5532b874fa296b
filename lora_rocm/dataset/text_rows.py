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
from lora_rocm.dataset.records import UnusableText
from lora_rocm.dataset.row_reference import MAX_ROW_BYTES
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.recipe.schema import ResolvedSource

MAX_ARRAY_BYTES = 1 << 30
Row = tuple[str, Mapping[str, Any] | UnusableText, int | None]
"""The row's place, for people; its cells or why it has none; and where its line begins in a file of JSON Lines."""
NOT_UTF8 = UnusableText("It is not UTF-8 text.", "Save the file as UTF-8.")


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
            yield f"{source.split}:{number}", row, None
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
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = (line.decode("utf-8-sig", "surrogateescape") for line in file)
    reader = csv.DictReader(lines)
    for row in reader:
        bad = any("\udc80" <= letter <= "\udcff" for cell in row.values() for letter in str(cell))
        yield reader.line_num, NOT_UTF8 if bad else row, None


READERS: Mapping[str, Callable[[BinaryIO], Numbered]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
}
