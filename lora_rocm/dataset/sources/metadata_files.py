"""Reads ``metadata.jsonl`` and ``metadata.csv`` of Hugging Face's imagefolder format, and kohya's JSON files.

The files are untrusted. Sizes are limited, unusable rows are counted and the first few are named. A file name may not
lead out of the metadata file's folder.
"""

from __future__ import annotations

import csv
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lora_rocm.dataset.columns import FirstN
from lora_rocm.dataset.rows.row_cells import NameCount, has_content
from lora_rocm.dataset.skipped_files import counted, first_names, some
from lora_rocm.dataset.sources.given import Given, UnusableValue, loss_weight, rectangle
from lora_rocm.errors import DataError
from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json
from lora_rocm.foundation.names import NameIndex, name_key
from lora_rocm.foundation.terminal_text import legible, one_line

MAX_CELL_LETTERS = 1 << 17  # a quote that is never closed includes the rest of the file in its cell
READ_NAMES = ("metadata.jsonl", "metadata.csv")
PARQUET_NAME = "metadata.parquet"
METADATA_NAMES = (*READ_NAMES, PARQUET_NAME)
FILE_COLUMN = "file_name"
MAX_METADATA_BYTES, MAX_JSON_BYTES, MAX_ROW_BYTES = 1 << 30, 1 << 28, 1 << 18
MAX_CAPTION_BYTES = 1 << 16  # text encoders see a few hundred words at most
MAX_COLUMNS_NAMED = 10
DRIVE = re.compile(r"[A-Za-z]:")


class BadRow(Exception):
    """A row of metadata that cannot be used. The message is the reason."""


Captions = str | tuple[str, ...]
"""The caption of an image, or several captions."""


def captions_in(value: object) -> Captions | None:
    """Return the captions in a JSON value that is a text or a list of texts; None if it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    return None


@dataclass
class SourceMetadata:
    """Captions, loss weights and crops from the metadata files of one source, and statistics about the rows.

    column: the column of captions; "" if captions are not read.
    weight_column, crop_column: the columns for ``Given``; None if not read.
    positions: index of each image, by its path relative to the source's folder (as on disk, with slashes).
    bad: rows that cannot be used.
    unknown: files that rows name but that are not among the images.
    repeated: images that further rows name again.
    other_columns: columns of the first row that lacks the caption column.
    unread: columns with content that are not read. Rows that lack the caption column are excluded.
    """

    column: str
    positions: NameIndex[int]
    bad: FirstN = field(default_factory=first_names)
    unknown: FirstN = field(default_factory=first_names)
    repeated: FirstN = field(default_factory=first_names)
    other_columns: list[str] = field(default_factory=list)
    unread: NameCount = field(default_factory=NameCount)
    num_without_column: int = 0
    weight_column: str | None = None
    crop_column: str | None = None

    def __post_init__(self) -> None:
        self._captions: list[Captions | None] = [None] * len(self.positions)
        self._given: dict[int, Given | UnusableValue] = {}

    def caption(self, position: int) -> Captions | None:
        """Return the caption or captions of an image; None if no row contains any. ``position``: index of the image."""
        return self._captions[position]

    def given(self, position: int) -> Given:
        """Return the loss weight and crop of an image, from the first row that has any.

        ``position``: index of the image.

        Raises:
            UnusableValue: the row has an unusable value.
        """
        found = self._given.get(position, Given())
        if isinstance(found, UnusableValue):
            raise found
        return found

    def read(self, path: Path, relative: str) -> None:
        """Read the rows of one metadata file. ``relative``: the file's path relative to the source's folder.

        Raises:
            OSError: the file cannot be read, is not a regular file, or is too large.
        """
        check_plain(path, MAX_METADATA_BYTES)
        folder = posixpath.dirname(relative)
        with path.open("rb") as file:
            for line, row in _rows(path, file):
                try:
                    if isinstance(row, BadRow):
                        raise row
                    self._take(row, folder)
                except BadRow as error:
                    self.bad.append(f"{legible(relative)}, line {line}: {error}")

    def read_json(self, path: Path, root: Path) -> None:
        """Read a JSON file in kohya's format: an object that maps each image to its caption and tags.

        Caption and tags are joined by a comma, as kohya's scripts do.

        Args:
            path: the file.
            root: the folder of the images. The file names them by paths in it, with or without extension.

        Raises:
            DataError: the file cannot be read, or is not such an object.
        """
        try:
            rows = parse_json(read_plain(path, MAX_JSON_BYTES).decode("utf-8-sig"))
            if not isinstance(rows, dict):
                raise BadRow("not a JSON object")
        except (OSError, ValueError, BadRow) as error:
            what = f"The file of captions cannot be read: {one_line(str(error))[:200]}."
            fix = "Use a JSON file of image names, each with caption or tags, or remove data.metadata_file."
            raise DataError("metadata-unreadable", what, where=f"data.metadata_file: {path}", fix=fix) from error
        stems = NameIndex((posixpath.splitext(real)[0], real) for real, _ in self.positions.items())
        above = name_key(root.as_posix().rstrip("/") + "/")
        for name, row in rows.items():
            values = dict(row) if isinstance(row, dict) else {"caption": row}
            place = name.replace("\\", "/")
            place = place[len(above) :] if place.startswith(above) else name_key(place).removeprefix(above)
            named = stems.find(place)
            try:
                caption = _with_tags(values)
                for read in ("captions" if values.get("captions") else "caption", "tags"):
                    values.pop(read, None)
                self._take({**values, FILE_COLUMN: place if named is None else named[1], self.column: caption}, "")
            except BadRow as error:
                self.bad.append(f"{legible(path.name)}, {legible(name)[:100]}: {error}")

    def notices(self) -> list[str]:
        """Return notices about rows and columns that were not used."""
        said = []
        if self.bad:
            are = counted(self.bad, "row of metadata is", "rows of metadata are")
            said.append(f"{are} not used: {some(self.bad)}.")
        if self.unknown:
            name = counted(self.unknown, "row of metadata names a file that is", "rows of metadata name files that are")
            said.append(f"{name} not among the images: {some(self.unknown)}.")
        if self.repeated:
            name = counted(self.repeated, "row of metadata names", "rows of metadata name")
            said.append(f"{name} an image again; the first row is used: {some(self.repeated)}.")
        if self.num_without_column:
            others = ", ".join(self.other_columns) or "none"
            said.append(
                f"Rows of metadata without the column {legible(self.column)}: {self.num_without_column} (columns: "
                f"{others}). Set caption_column of the source in data.sources to a different column."
            )
        said += self.unread.notices("Columns of metadata that are not read")
        return said

    def _take(self, row: Mapping[str, Any], folder: str) -> None:
        # Find the image of the row.
        name = row.get(FILE_COLUMN)
        if not isinstance(name, str) or not name:
            raise BadRow(f"no {FILE_COLUMN}")
        found = self.positions.find(_place(name, folder))
        if found is None:
            self.unknown.append(legible(name))
            return
        position = found[1]
        # Take its values, and then its captions.
        self._take_given(row, position)
        self._count_unread(row)
        if not self.column and row.get("") is None:
            return
        if self.column not in row:
            self.num_without_column += 1
            if not self.other_columns:  # keep the columns of the first such row
                names = [legible(str(key))[:40] for key in row if key != FILE_COLUMN]
                self.other_columns = names[:MAX_COLUMNS_NAMED]
            return
        caption = row[self.column]
        if caption is None:
            return
        captions = captions_in(caption)
        if captions is None:
            raise BadRow(f"{self.column} is neither a text nor a list of texts")
        texts = (captions,) if isinstance(captions, str) else captions
        if sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) > MAX_CAPTION_BYTES:
            raise BadRow(f"its caption is larger than {MAX_CAPTION_BYTES >> 10} KiB")
        if self._captions[position] is not None:
            self.repeated.append(legible(name))
            return
        self._captions[position] = captions

    def _count_unread(self, row: Mapping[str, Any]) -> None:
        if self.column and self.column not in row:  # such rows have their own notice with their columns
            return
        read = (FILE_COLUMN, self.column, self.weight_column, self.crop_column)
        for key in (key for key, value in row.items() if key not in read and has_content(value)):
            self.unread.add(key)

    def _take_given(self, row: Mapping[str, object], position: int) -> None:
        weight, crop = (row.get(name) if name else None for name in (self.weight_column, self.crop_column))
        if position in self._given or (weight in (None, "") and crop in (None, "")):
            return
        try:
            self._given[position] = given_of(weight, crop)
        except UnusableValue as error:
            self._given[position] = error


def given_of(weight: object, crop: object) -> Given:
    """Return the values of a row's cells. A cell that is None or an empty text gives the default.

    Raises:
        UnusableValue: a cell has an unusable value.
    """
    return Given(1.0 if weight in (None, "") else loss_weight(weight), None if crop in (None, "") else rectangle(crop))


def _with_tags(values: Mapping[str, object]) -> list[str] | str | None:
    """Return an image's caption or captions from kohya's file, each followed by the tags; None if it has neither.

    Raises:
        BadRow: a caption or the tags are not text.
    """
    captions, tags = captions_in(values.get("captions") or values.get("caption") or ""), values.get("tags") or ""
    if captions is None or not isinstance(tags, str):
        raise BadRow("its caption is not text")
    if isinstance(captions, str):
        return ", ".join(part for part in (captions, tags) if part) or None
    return [", ".join(part for part in (caption, tags) if part) for caption in captions]


def names_files(path: Path) -> bool:
    """Whether a metadata file has a column of file names, as in the imagefolder format. The first row is checked."""
    try:
        check_plain(path, MAX_METADATA_BYTES)
        if path.name == PARQUET_NAME:
            from pyarrow import parquet

            columns: Iterable[str] = parquet.read_schema(path).names
        else:
            with path.open("rb") as file:
                _, row = next(_rows(path, file), (0, {}))
            columns = () if isinstance(row, BadRow) else row
    except (OSError, ValueError):  # also Arrow's errors; the fault is reported when the file is read
        return False
    return any(name == FILE_COLUMN or name.endswith(f"_{FILE_COLUMN}") for name in columns)


def _rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    return _csv_rows(file) if path.suffix.lower() == ".csv" else _json_rows(file)


def _place(name: str, folder: str) -> str:
    """Convert a file name in a metadata file to a path relative to the source's folder.

    Args:
        name: the file name, relative to the metadata file's folder.
        folder: the metadata file's folder, relative to the source's folder.

    Raises:
        BadRow: the name leads out of the metadata file's folder.
    """
    plain = name.replace("\\", "/")
    inside = posixpath.normpath(plain)
    if plain.startswith("/") or DRIVE.match(plain) or "\0" in plain or inside.split("/")[0] == "..":
        raise BadRow(f"{FILE_COLUMN} leads out of the folder: {legible(name)[:100]}")
    return posixpath.normpath(posixpath.join(folder, inside))


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | BadRow]]:
    """Yield every line with its number. A line that is too long is replaced by a ``BadRow``."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, BadRow(f"longer than {MAX_ROW_BYTES >> 10} KiB")
        else:
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json_rows(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    for number, line in _lines(file):
        if isinstance(line, BadRow):
            yield number, line
        elif line.strip():
            yield number, _json_row(line)


def _json_row(line: bytes) -> Mapping[str, Any] | BadRow:
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError:
        return BadRow("not UTF-8 text")
    except NoJson:
        return BadRow("not JSON")
    except BadJson as error:
        return BadRow(str(error))
    return row if isinstance(row, dict) else BadRow("not a JSON object")


def _csv_rows(file: BinaryIO) -> Iterator[tuple[int, Mapping[str, Any] | BadRow]]:
    """Yield line number and row of a CSV file with a header.

    Reading stops at a damaged row, because it is unknown where the next row begins.
    """
    csv.field_size_limit(MAX_CELL_LETTERS)  # this sets the limit of the whole process; tables of texts raise it
    reader = csv.reader(_texts(file))
    try:
        header = next(reader, [])
        if len(set(header)) != len(header):
            yield 1, BadRow("a column occurs twice")
            return
        for cells in reader:
            if cells:
                fits = len(cells) == len(header)
                row = dict(zip(header, cells, strict=True)) if fits else BadRow("more or fewer cells than columns")
                yield reader.line_num, row
    except UnicodeDecodeError:
        yield reader.line_num + 1, BadRow("not UTF-8 text; nothing after it was read")
    except (csv.Error, BadRow) as error:
        yield reader.line_num + 1, BadRow(f"{error}; nothing after it was read")


def _texts(file: BinaryIO) -> Iterator[str]:
    for _, line in _lines(file):
        if isinstance(line, BadRow):
            raise line
        yield line.decode("utf-8")
