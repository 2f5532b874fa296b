"""The crop of an image: a row of metadata.jsonl, which training reads with ``crop_column``."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.sources.given import Rectangle
from lora_rocm.dataset.sources.metadata_files import FILE_COLUMN, READ_NAMES
from lora_rocm.errors import UserError
from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.ui.edits import Edits, SavedEdit
from lora_rocm.ui.image_set.changes import ChangeJournal
from lora_rocm.ui.image_set.listing import LISTINGS, ImageListing
from lora_rocm.ui.image_set.saving import Resolve

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class OpenCrop:
    """The crop of an image as its editor shows it.

    Attributes:
        path: the metadata file, with links resolved; it may not exist.
        version: its version.
        rectangle: the part of the image that is used; None for all of it.
        column: the column of the file.
        is_read: whether the recipe reads this column. It is False if no recipe is chosen.
    """

    path: Path
    version: str
    rectangle: Rectangle | None
    column: str
    is_read: bool


def opened_crop(edits: Edits, resolve: Resolve, listing: ImageListing, name: str) -> OpenCrop:
    """Return the crop of an image as its editor shows it.

    Raises:
        UserError: no-image; or outside-folders.
        StorageError: the metadata file cannot be read.
    """
    path = resolve(str(listing.root / READ_NAMES[0]))
    _, version = edits.read(path)
    present = LISTINGS.of(listing.reading)  # after the version: a crop that is newer than its version is a conflict
    present.path(name)
    is_read = listing.reading.options.crop_column is not None
    return OpenCrop(path, version, present.crop(name), listing.reading.crop_column, is_read)


def save_crop(
    edits: Edits,
    resolve: Resolve,
    journal: ChangeJournal,
    listing: ImageListing,
    name: str,
    crop: Rectangle | None,
    version: str,
) -> SavedEdit:
    """Save the crop of an image in metadata.jsonl, or remove it if ``crop`` is None. Other rows stay as they are.

    Args:
        edits: saves the file.
        resolve: see ``Resolve``.
        journal: the journal of the folder.
        listing: the listing with the image.
        name: the image.
        crop: left, top, width and height in pixels of the upright image.
        version: the version of metadata.jsonl that the editor saw.

    Raises:
        EditConflict: the file has changed since.
        UserError: crop-outside: the crop leads out of the image; crop-elsewhere: another file has its crop;
            name-unwritable: the image's name cannot be written in JSON; no-image or outside-folders.
        StorageError: the file cannot be read or written.
    """
    size, real = listing.size(name) or (0, 0), listing.real_name(name)
    if crop is not None and (crop[0] + crop[2] > size[0] or crop[1] + crop[3] > size[1] or min(crop[2:]) <= 0):
        what = f"This crop is not inside the image, which is {size[0]}x{size[1]}."
        raise UserError("crop-outside", what, where=name, fix="Choose a part of the image.")
    try:
        real.encode("utf-8")
    except UnicodeEncodeError:
        fix = "Rename the image."
        raise UserError("name-unwritable", "This name cannot be written in a file.", where=name, fix=fix) from None
    path = resolve(str(listing.root / READ_NAMES[0]))
    before, _ = edits.read(path)
    options, column = listing.reading.options, listing.reading.crop_column
    after, had_crop = with_crop(before or b"", real, column, crop, options.caption_column)
    if listing.crop(name) is not None and not had_crop:
        fix = "Change it there, or remove its column from that file."
        raise UserError("crop-elsewhere", "Another metadata file has the crop of this image.", where=name, fix=fix)
    saved = edits.save(path, after or None, version)
    if saved.undo:
        journal.add("crop", [path])
    return saved


def with_crop(
    content: bytes, real: str, column: str, crop: Rectangle | None, caption_column: str | None
) -> tuple[bytes, bool]:
    """Return the content of a metadata.jsonl with the crop of one image changed, and whether it had one.

    Args:
        content: the file's content.
        real: the image's path relative to the file's folder.
        column: the column of crops.
        crop: the new crop; None removes it.
        caption_column: the column of captions. A new row has an empty cell there, because a row without it is reported.
    """
    lines = content.removeprefix(BOM).splitlines(keepends=True)
    rows = {place: row for place, line in enumerate(lines) if (row := _row(line, real)) is not None}
    # training takes the first row that has a value
    place = next((place for place, row in rows.items() if row.get(column)), next(iter(rows), None))
    had_crop = any(bool(row.get(column)) for row in rows.values())
    row = dict(rows[place]) if place is not None else {FILE_COLUMN: real}
    row.pop(column, None)
    if crop is not None:
        if caption_column is not None:
            row.setdefault(caption_column, None)
        row[column] = list(crop)
    if place is None and lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    has_value = any(value not in (None, "") for key, value in row.items() if key != FILE_COLUMN)
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n" if has_value else b""
    if place is None:
        lines.append(line)
    else:
        lines[place] = line
    return b"".join(lines), had_crop


def _row(line: bytes, real: str) -> Mapping[str, object] | None:
    """Return the row of an image; None if the line is about another one or cannot be read."""
    try:
        row = parse_json(line)
    except BadJson:
        return None
    name = row.get(FILE_COLUMN) if isinstance(row, dict) else None
    return row if isinstance(name, str) and posixpath.normpath(name.replace("\\", "/")) == real else None
