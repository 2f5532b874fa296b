"""The images of a folder with their captions, found by the functions of training and kept until the folder changes."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from lora_rocm.dataset.captions.captions import tags_of
from lora_rocm.dataset.companions.paired_files import PairedFiles
from lora_rocm.dataset.images.image_io import UnreadableImage, read_header
from lora_rocm.dataset.rows.row_cells import NameCount
from lora_rocm.dataset.sample_table import Sample
from lora_rocm.dataset.sources.folders import Folder, Tables, UnusableCaption, read_captions, source_folder, walk
from lora_rocm.dataset.sources.given import Rectangle, UnusableValue
from lora_rocm.dataset.sources.metadata_files import READ_NAMES
from lora_rocm.errors import DataError, UserError
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.recipe.sections import BESIDE, caption_endings
from lora_rocm.ui.image_set.reading import FolderReading

MAX_LISTINGS = 4
Version = FileVersion | None


@dataclass(frozen=True)
class ImageCaption:
    """The captions of an image.

    Attributes:
        texts: the captions, as they are in the file.
        files: its caption files, at most one for each caption extension.
        origin: whether they come from files, from a metadata file, or the image has none.
        problem: why they cannot be read; empty if they can.
    """

    texts: tuple[str, ...]
    files: tuple[Path, ...]
    origin: Literal["file", "metadata", "none"]
    problem: str = ""

    @property
    def text(self) -> str:
        return self.texts[0] if self.texts else ""


class ImageListing:
    """The images of one folder.

    Names are the printable paths of images relative to the folder, with slashes. They are keys: a request that names
    an image chooses one of them, and never a path.

    Args:
        reading: how the folder is read.

    Raises:
        DataError: there is no such folder, or it has no images.
    """

    def __init__(self, reading: FolderReading) -> None:
        options = reading.options
        self.reading, self.root = reading, source_folder(options.path or "", 0)
        before = self._signature([self.root])
        skip = [path for path in (options.mask_path, *options.control_places) if path and path != BESIDE]
        self._folder: Folder = walk(
            self.root,
            options.caption_extension,
            recursive=options.recursive,
            include=options.include,
            exclude=options.exclude,
            tables=Tables(
                options.caption_column, options.loss_weight_column, reading.crop_column, options.metadata_file
            ),
            skip=skip,
            path_keys=("mask_path", "control_path"),
            key=options.key,
        )
        self._positions = {relative: position for position, (relative, _) in enumerate(self._folder.relatives)}
        self._captions = dict[str, tuple[tuple[Version, ...], ImageCaption]]()
        self._sizes = dict[str, tuple[Version, tuple[int, int] | None]]()
        after = self._signature(self._parents)
        self.signature = after if set(before) <= set(after) else ()  # it has changed while it was read: read it again

    @cached_property
    def names(self) -> Sequence[str]:
        """All images, sorted."""
        return list(self._positions)

    @property
    def notices(self) -> Sequence[str]:
        """The notices about the folder, such as skipped files."""
        return self._folder.notices

    @cached_property
    def _parents(self) -> list[Path]:
        parents = {self.root / os.path.dirname(real) for _, real in self._folder.relatives}
        return sorted(
            parents | {above for path in parents for above in path.parents if above.is_relative_to(self.root)}
        )

    def path(self, name: str) -> Path:
        """Return the file of an image.

        Raises:
            UserError: no-image: the folder has no such image.
        """
        position = self._positions.get(name)
        if position is None:
            fix = "It may have been moved or deleted. Open the folder again."
            raise UserError("no-image", "There is no such image in this folder.", where=name[:200], fix=fix)
        return self.root / self._folder.relatives[position][1]

    def is_image(self, path: Path) -> bool:
        """Whether a path is one of the images, which no change may write."""
        relative = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else ""
        return any(real == relative for _, real in self._folder.relatives)

    def real_name(self, name: str) -> str:
        """Return the path of an image relative to the folder, as it is on disk."""
        return self.path(name).relative_to(self.root).as_posix()

    def caption(self, name: str) -> ImageCaption:
        """Return the captions of an image. They are read again if one of the files has changed."""
        path = self.path(name)
        files = tuple(self._folder.captions.of(path))
        versions = tuple(_version(file) for file in files)
        kept = self._captions.get(name)
        if kept is None or kept[0] != versions:
            kept = self._captions[name] = (versions, self._read_caption(name, files))
        return kept[1]

    def _read_caption(self, name: str, files: tuple[Path, ...]) -> ImageCaption:
        if not files:
            listed = self._folder.listed_caption(self._positions[name])
            if listed is None:
                return ImageCaption((), (), "none")
            return ImageCaption((listed,) if isinstance(listed, str) else listed, (), "metadata")
        try:
            texts = tuple(text for file in files for text in read_captions(file, NameCount()))
        except UnicodeDecodeError:
            return ImageCaption((), files, "file", "not UTF-8")
        except (OSError, UnusableCaption) as error:
            return ImageCaption((), files, "file", str(error))
        return ImageCaption(texts, files, "file")

    def caption_file(self, name: str) -> Path:
        """Return the caption file of an image, or the place of a new one: the image's name and the first extension."""
        files = self.caption(name).files
        ending = caption_endings(self.reading.options.caption_extension)[0]
        return files[0] if files else Path(os.path.splitext(self.path(name))[0] + ending)

    def crop(self, name: str) -> Rectangle | None:
        """Return the crop that a metadata file contains for an image; None for the whole image."""
        try:
            return self._folder.given(self._positions[name]).crop
        except UnusableValue:
            return None

    @cached_property
    def _masks(self) -> PairedFiles:
        return PairedFiles(self.reading.options, 0, self.reading.options.mask_path or BESIDE, "mask_path", "mask")

    def mask(self, name: str) -> Path | None:
        """Return the mask of an image, found as in training; None if it has none."""
        sample = Sample(name, 0, "", self.path(name), "", 1, 1, 1, self.reading.options)
        try:
            return self._masks.of(sample)
        except DataError:  # the recipe's folder of masks does not exist yet
            return None

    def size(self, name: str) -> tuple[int, int] | None:
        """Return width and height of an image; None if it cannot be read."""
        path = self.path(name)
        version = _version(path)
        kept = self._sizes.get(name)
        if kept is None or kept[0] != version:
            try:
                kept = (version, read_header(path).size)
            except UnreadableImage:
                kept = (version, None)
            self._sizes[name] = kept
        return kept[1]

    def tags(self) -> Counter[str]:
        """Return the number of images with each comma-separated tag."""
        found = Counter[str]()
        for name in self.names:
            found.update({tag for text in self.caption(name).texts for tag in tags_of(text)})
        return found

    def is_current(self) -> bool:
        """Whether no file was added, removed or renamed, and no metadata file written, since the folder was read."""
        return self.signature == self._signature(self._parents)

    def note_caption(self, name: str, path: Path) -> None:
        """Take a caption file into account that was just saved or deleted, without reading the folder again."""
        if not path.exists():
            self.signature = ()  # a file may be left that was hidden by this one
            return
        if path not in self._folder.captions.of(self.path(name)):
            self._folder.captions.add(self._folder.captions.ending_of(path.name.lower()), str(path))
        self.signature = self._signature(self._parents)

    def note_mask(self) -> None:
        """Take into account that a mask was just saved or deleted, without reading the folder again."""
        self.__dict__.pop("_masks", None)
        self.signature = self._signature(self._parents)

    def _signature(self, folders: Sequence[Path]) -> tuple[tuple[str, int | Version], ...]:
        """Return a value that differs after a file was added, removed or renamed, or a metadata file was written."""
        found = list[tuple[str, int | Version]]()
        tables = [folder / name for folder in folders for name in READ_NAMES]
        if self.reading.options.metadata_file is not None:
            tables.append(Path(self.reading.options.metadata_file))
        for folder in folders:
            try:
                found.append((str(folder), folder.stat().st_mtime_ns))
            except OSError:
                found.append((str(folder), 0))
        return (*found, *((str(path), version) for path in tables if (version := _version(path)) is not None))


def _version(path: Path) -> Version:
    try:
        return FileVersion.of(path)
    except OSError:
        return None


class ImageListings:
    """The newest listings. A folder is listed again as soon as a file was added, removed or renamed."""

    def __init__(self) -> None:
        self._lock, self._kept = threading.Lock(), OrderedDict[str, ImageListing]()

    def of(self, reading: FolderReading) -> ImageListing:
        """Return the listing of a folder.

        Raises:
            DataError: there is no such folder, or it has no images.
        """
        key = f"{reading.folder}|{reading.recipe}|{reading.data.model_dump_json()}"
        with self._lock:
            kept = self._kept.pop(key, None)
            listing = kept if kept is not None and kept.is_current() else ImageListing(reading)
            self._kept[key] = listing
            while len(self._kept) > MAX_LISTINGS:
                self._kept.popitem(last=False)
            return listing

    def forget(self) -> None:
        """Forget all listings, so that folders are read again."""
        with self._lock:
            self._kept.clear()


LISTINGS = ImageListings()
"""The listings of this process."""
