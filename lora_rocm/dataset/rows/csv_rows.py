"""Reads the rows of a CSV file of texts (RFC 4180). The first line contains the column names."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.foundation.units import count_text

MAX_ROW_BYTES = 1 << 24
NOT_UTF8 = UnusableText("It is not UTF-8 text.", "Save the file as UTF-8.")
OPEN_QUOTE = UnusableText(
    "A quote that opens in this row is never closed.",
    'Close the quote. If it is part of the text, write it twice ("").',
)
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


class _Cells:
    """Splits an open file into rows, each a list of cells, starting at the file's current position."""

    def __init__(self, file: BinaryIO) -> None:
        csv.field_size_limit(MAX_ROW_BYTES)
        self._file, self._reader = file, csv.reader(_lines(file))

    @property
    def line(self) -> int:
        """Number of the line at which the next row begins."""
        return self._reader.line_num + 1

    def next(self) -> list[str] | None:
        """Return the cells of the next row: an empty list for an empty line, None at the end of the file.

        Nothing is read beyond the row.

        Raises:
            DataError: "table-row", if the row cannot be read.
        """
        line, begin = self.line, self._file.tell()
        try:
            return next(self._reader, None)
        except csv.Error as error:
            end = self._file.tell()
            self._file.seek(begin)
            if b"\r" in self._file.read(end - begin).replace(b"\r\n", b""):
                what = (
                    "A line ends in a carriage return (CR) without a line feed, or a cell without quotes contains one."
                )
                fix = "Save the file with CRLF or LF line ends, and quote cells that contain line ends."
            else:
                what = f"The row that begins here cannot be read: {error}."
                fix = f"Rows are limited to {MAX_ROW_BYTES >> 20} MiB: split the row, or close the quotes of its cells."
            raise DataError("table-row", what, where=f"{self._file.name}:{line}", fix=fix) from error

    def columns(self) -> Sequence[str]:
        """Return the column names from the first row that is not empty; an empty sequence if there is no such row.

        Raises:
            DataError: "table-header" if the names cannot be used, or "table-row" (see ``next``).
        """
        line, names = self.line, self.next()
        while names == []:
            line, names = self.line, self.next()
        if not names:
            return ()
        count = Counter(names)
        twice = next((name for name in names if name and count[name] > 1), None)
        between = next((title for mark, title in SEPARATORS.items() if len(names) == 1 and mark in names[0]), "")
        if not _is_text(names):
            what, fix = NOT_UTF8.what, NOT_UTF8.fix
        elif twice is not None:
            what, fix = f"Two columns have the name {shown(twice):.60}.", "Rename or remove one."
        elif between:
            what, fix = (
                f"The cells are separated by {between}, not by commas.",
                "Save the table with commas between its cells.",
            )
        else:
            return names
        raise DataError("table-header", what, where=f"{self._file.name}:{line}", fix=fix)


def rows_in(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, str] | UnusableText, int]]:
    """Yield every row as (number of its first line, cells by column, byte offset).

    A row that cannot be used has an ``UnusableText`` with the reason in place of its cells.

    Raises:
        DataError: the header is invalid, or the rows cannot be separated.
        OSError: the file cannot be read.
    """
    rows, size_bytes = _Cells(file), os.fstat(file.fileno()).st_size
    columns = rows.columns()
    while True:
        line, begin, cells = rows.line, file.tell(), rows.next()
        if cells is None:
            return
        if cells and file.tell() >= size_bytes and _is_open(file, begin):
            yield line, OPEN_QUOTE, begin
        elif cells:
            yield line, _row(columns, cells), begin


def row_at(path: Path, begin: int) -> Mapping[str, str]:
    """Return the cells, by column, of the row at a byte offset.

    Raises:
        OSError, LookupError, UnusableText: there is no such row, for example because the file has changed.
    """
    try:
        with path.open("rb") as file:
            columns = _columns_of(FileVersion.of(path, os.fstat(file.fileno())))
            file.seek(begin)
            cells = _Cells(file).next()
    except DataError as error:
        raise LookupError(str(error)) from error
    row = _row(columns, cells or ())
    if isinstance(row, UnusableText):
        raise row
    return row


@lru_cache(maxsize=64)
def _columns_of(version: FileVersion) -> Sequence[str]:
    """Return the column names of a file version. They are cached, because rows are read later one by one."""
    with Path(version.path).open("rb") as file:
        return _Cells(file).columns()


def _row(columns: Sequence[str], cells: Sequence[str]) -> Mapping[str, str] | UnusableText:
    """Return the cells by column, or the reason why the cells do not match the columns."""
    if not _is_text(cells):
        return NOT_UTF8
    more = [cell for cell in cells[len(columns) :] if cell]
    if len(cells) < len(columns) or more:
        what = f"It has {count_text(len(cells), 'cell')}, but the table has {count_text(len(columns), 'column')}."
        fix = "Quote cells that contain commas." if more else "Add the missing cells, which may be empty."
        return UnusableText(what, fix)
    return dict(zip(columns, cells, strict=False))


def _is_text(cells: Sequence[str]) -> bool:
    """Whether cells from ``_lines`` were valid UTF-8 text. UTF-16 is detected by the zero bytes between its letters."""
    try:
        return b"\0" not in "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return False


def _is_open(file: BinaryIO, begin: int) -> bool:
    """Whether the last row of a file has an opening quote but no closing one. Leaves the file position at the end.

    ``begin``: byte offset of the row.
    """
    file.seek(begin)
    try:
        for _ in csv.reader(_lines(file), strict=True):
            pass
    except csv.Error as error:
        file.seek(0, os.SEEK_END)
        return "end of data" in str(error)
    return False


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a file. Bytes that are not UTF-8 become lone surrogates.

    Raises:
        csv.Error: a line is longer than ``MAX_ROW_BYTES``.
    """
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise csv.Error(f"a line is longer than {MAX_ROW_BYTES >> 20} MiB")
        yield line.decode("utf-8-sig", "surrogateescape")
