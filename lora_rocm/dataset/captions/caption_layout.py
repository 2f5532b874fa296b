"""Finds how the images of a folder are captioned: by files, by metadata, by names, or not at all; and their crops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.sources.file_kinds import CAPTION_SUFFIXES
from lora_rocm.dataset.sources.folders import Folder, Tables, describes, file_name_caption, walk
from lora_rocm.dataset.sources.given import CROP_COLUMN, UnusableValue


@dataclass(frozen=True)
class CaptionLayout:
    """The captions of the images in a folder.

    Attributes:
        num_images: number of images.
        of_extension: number of images with a caption file, by its extension, the most frequent first.
        with_metadata: number of images with a caption in a metadata file but no caption file.
        with_folder_name: number of images without caption in a ``10_name`` folder.
        with_file_name: number of images without caption that have a descriptive file name.
        missing: number of images without a caption file and without a caption in a metadata file.
        num_cropped: number of images with a value in the column ``CROP_COLUMN``, usable or not.
    """

    num_images: int
    of_extension: dict[str, int]
    with_metadata: int
    with_folder_name: int
    with_file_name: int
    missing: int
    num_cropped: int

    @property
    def extensions(self) -> tuple[str, ...]:
        return tuple(self.of_extension)


def caption_layout(root: Path) -> CaptionLayout:
    """Examine the folder and its sub-folders. Only names and metadata files are read.

    Raises:
        DataError: there are no images.
    """
    folder = walk(root, CAPTION_SUFFIXES, tables=Tables(crop_column=CROP_COLUMN))
    of_extension: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for position, (path, relative) in enumerate(folder.images):
        if files := folder.captions.of(path):
            of_extension[files[0].suffix.lower()] += 1
        elif folder.listed_caption(position) is not None:
            counts["metadata"] += 1
        else:
            counts["missing"] += 1
            counts["folder"] += bool(folder.repeat_folder(relative).name)
            counts["file"] += describes(file_name_caption(path))
        counts["crop"] += _is_cropped(folder, position)
    return CaptionLayout(
        len(folder.relatives),
        dict(of_extension.most_common()),
        counts["metadata"],
        counts["folder"],
        counts["file"],
        counts["missing"],
        counts["crop"],
    )


def _is_cropped(folder: Folder, position: int) -> bool:
    try:
        return folder.given(position).crop is not None
    except UnusableValue:  # the reader of crops explains it
        return True
