"""Reads the rows of a CSV file of texts (RFC 4180). The first line names its columns."""

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
    "A quote that opens in this row is never closed.", 'Close it, or double it: a quote is written "".'
)
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


class _Cells:
    """The rows of an open file as lists of cells, from its position on."""

    def __init__(self, file: BinaryIO) -> None:
        csv.field_size_limit(MAX_ROW_BYTES)
        self._file, self._reader = file, csv.reader(_lines(file))

    @property
    def line(self) -> int:
        """The line at which the next row begins."""
        return self._reader.line_num + 1

    def next(self) -> list[str] | None:
        """The cells of the next row: an empty list for an empty line, None at the end. Reads no line beyond the row.

        Raises:
            DataError: table-row.
        """
        line, begin = self.line, self._file.tell()
        try:
            return next(self._reader, None)
        except csv.Error as error:
            end = self._file.tell()
            self._file.seek(begin)
            if b"\r" in self._file.read(end - begin).replace(b"\r\n", b""):
                what = "A carriage return (CR) without a line feed ends a line, or is in a cell without quotes."
                fix = "Save the file with CRLF or LF line ends, and quote cells that have line ends."
            else:
                what = f"The row that begins here cannot be read: {error}."
                fix = f"A row has up to {MAX_ROW_BYTES >> 20} MiB: split it, or close the quotes of its cells."
            raise DataError("table-row", what, where=f"{self._file.name}:{line}", fix=fix) from error

    def columns(self) -> Sequence[str]:
        """The names in the first row that is not empty; none if there is none.

        Raises:
            DataError: table-header, or as ``next``.
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
            what, fix = f"Its cells are separated by {between}.", "Save the table with commas between its cells."
        else:
            return names
        raise DataError("table-header", what, where=f"{self._file.name}:{line}", fix=fix)


def rows_in(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, str] | UnusableText, int]]:
    """Every row: its first line, its cells by column (or the reason why it has none), and the byte at which it begins.

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
    """The cells of the row that begins at a byte.

    Raises:
        OSError, LookupError, UnusableText: there is no such row, as after a change of the file.
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
    """The columns of a version of a file, cached for rows that are read later."""
    with Path(version.path).open("rb") as file:
        return _Cells(file).columns()


def _row(columns: Sequence[str], cells: Sequence[str]) -> Mapping[str, str] | UnusableText:
    """The cells by column, or the reason why they do not form a row."""
    if not _is_text(cells):
        return NOT_UTF8
    more = [cell for cell in cells[len(columns) :] if cell]
    if len(cells) < len(columns) or more:
        what = f"It has {count_text(len(cells), 'cell')}, but the table has {count_text(len(columns), 'column')}."
        fix = "Quote cells with commas." if more else "Give each column a cell, which may be empty."
        return UnusableText(what, fix)
    return dict(zip(columns, cells, strict=False))


def _is_text(cells: Sequence[str]) -> bool:
    """Whether cells are UTF-8 (``_lines``), and not UTF-16, which has zeros between its letters."""
    try:
        return b"\0" not in "".join(cells).encode("utf-8")
    except UnicodeEncodeError:
        return False


def _is_open(file: BinaryIO, begin: int) -> bool:
    """Whether the last row, which begins at a byte, has a quote that is never closed. Leaves the file at its end."""
    file.seek(begin)
    try:
        for _ in csv.reader(_lines(file), strict=True):
            pass
    except csv.Error as error:
        file.seek(0, os.SEEK_END)
        return "end of data" in str(error)
    return False


def _lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a file; bytes that are not UTF-8 become lone surrogates.

    Raises:
        csv.Error: a line is longer than ``MAX_ROW_BYTES``.
    """
    while line := file.readline(MAX_ROW_BYTES + 1):
        if len(line) > MAX_ROW_BYTES:
            raise csv.Error(f"a line is longer than {MAX_ROW_BYTES >> 20} MiB")
        yield line.decode("utf-8-sig", "surrogateescape")
