"""Saves captions: of one image against the version that its editor saw, or of many images by one change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.sources.metadata_files import MAX_CAPTION_BYTES
from lora_rocm.errors import UserError
from lora_rocm.ui.edits import EditConflict, Edits, SavedEdit
from lora_rocm.ui.image_set.caption_edits import CaptionEdit
from lora_rocm.ui.image_set.changes import ChangeJournal, for_each
from lora_rocm.ui.image_set.listing import ImageListing

Resolve = Callable[[str], Path]
"""``Folders.resolve``: follows links, and refuses a path outside of the folders that the user named."""
FOREIGN = "cp1252"
"""The encoding of captions that are not UTF-8: most of them come from Windows."""


@dataclass(frozen=True)
class OpenCaption:
    """A caption file as its editor shows it.

    Attributes:
        path: the file, with links resolved; it may not exist.
        text: its content.
        version: its version.
        is_foreign: whether it is not UTF-8, so that training cannot read it. Saving it here writes UTF-8.
    """

    path: Path
    text: str
    version: str
    is_foreign: bool = False


@dataclass(frozen=True)
class Difference:
    """A caption before and after a change."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class ManyChanged:
    """The result of a change of many captions.

    Attributes:
        paths: the changed files.
        conflicts: images with a caption that changed at the same moment. The other change stays.
        left: images with captions in JSON, or with captions that cannot be read. They are unchanged.
    """

    paths: tuple[Path, ...]
    conflicts: tuple[str, ...]
    left: tuple[str, ...]


def opened(edits: Edits, resolve: Resolve, path: Path) -> OpenCaption:
    """Return a caption file as its editor shows it.

    Raises:
        UserError: outside-folders: a link leads out of the folders that the user named.
        StorageError: it cannot be read.
    """
    found = resolve(str(path))
    content, version = edits.read(found)
    try:
        return OpenCaption(found, (content or b"").decode("utf-8-sig"), version)
    except UnicodeDecodeError:
        return OpenCaption(found, (content or b"").decode(FOREIGN, "replace"), version, is_foreign=True)


def save_caption(
    edits: Edits, journal: ChangeJournal, listing: ImageListing, name: str, path: Path, text: str, version: str
) -> SavedEdit:
    """Save a caption file of an image.

    Args:
        edits: saves the file.
        journal: the journal of the folder.
        listing: the listing with the image.
        name: the image.
        path: the caption file, with links resolved.
        text: the new text.
        version: the version that the editor saw.

    Raises:
        EditConflict: the file has changed since.
        UserError: caption-too-large.
        StorageError: the file cannot be written.
    """
    saved = edits.save(path, _content(text, name), version)
    if saved.undo:
        journal.add("caption", [path])
    listing.note_caption(name, listing.caption_file(name))
    return saved


def _content(text: str, name: str) -> bytes:
    content = text.replace("\r\n", "\n").replace("\r", "\n").encode("utf-8", "replace")
    if len(content) > MAX_CAPTION_BYTES:
        what = f"This caption is larger than {MAX_CAPTION_BYTES >> 10} KiB, so training would refuse it."
        raise UserError("caption-too-large", what, where=name, fix="Shorten it.")
    return content


def differences(listing: ImageListing, names: Sequence[str], edit: CaptionEdit) -> Iterator[Difference]:
    """Yield the captions that a change would change. Images without a caption file get one if it adds a text."""
    for name in names:
        caption = listing.caption(name)
        if not caption.problem:
            before = caption.text
            if (after := edit.apply(before)) != before:
                yield Difference(name, before, after)


def change_many(
    edits: Edits,
    resolve: Resolve,
    journal: ChangeJournal,
    listing: ImageListing,
    names: Sequence[str],
    edit: CaptionEdit,
    advance: Callable[[int, int], None],
) -> ManyChanged:
    """Apply a change to the first caption of each image. Each file is saved on its own.

    Args:
        edits: saves the files.
        resolve: see ``Resolve``.
        journal: the journal of the folder; the whole change is one entry, also if it was cancelled.
        listing: the listing with the images.
        names: the images.
        edit: the change.
        advance: called with the number of finished images and of all; it may raise to cancel.

    Raises:
        UserError: outside-folders; or caption-too-large.
        StorageError: a file cannot be read or written; the files before it are changed.
    """
    paths, conflicts, left = list[Path](), list[str](), list[str]()

    def change(name: str) -> None:
        place = listing.caption_file(name)
        caption = opened(edits, resolve, place)
        if place.suffix.lower() == ".json" or caption.is_foreign:
            left.append(name)
            return
        before = caption.text if listing.caption(name).files else listing.caption(name).text
        after = edit.apply(before)
        if after == before:
            return
        try:
            edits.save(caption.path, _content(after, name), caption.version)
        except EditConflict:
            conflicts.append(name)
            return
        paths.append(caption.path)
        listing.note_caption(name, place)

    try:
        for_each(names, change, advance)
    finally:
        if paths:
            journal.add(edit.kind, sorted(paths))
    return ManyChanged(tuple(sorted(paths)), tuple(sorted(conflicts)), tuple(sorted(left)))
