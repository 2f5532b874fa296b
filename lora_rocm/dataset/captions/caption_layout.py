"""Finds how the images of a folder are captioned: by files, by metadata, by names, or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.sources.file_kinds import CAPTION_SUFFIXES
from lora_rocm.dataset.sources.folders import describes, file_name_caption, walk


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
    """

    num_images: int
    of_extension: dict[str, int]
    with_metadata: int
    with_folder_name: int
    with_file_name: int
    missing: int

    @property
    def extensions(self) -> tuple[str, ...]:
        return tuple(self.of_extension)


def caption_layout(root: Path) -> CaptionLayout:
    """Examine the folder and its sub-folders. Only names and metadata files are read.

    Raises:
        DataError: there are no images.
    """
    folder = walk(root, CAPTION_SUFFIXES)
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
    return CaptionLayout(
        len(folder.relatives),
        dict(of_extension.most_common()),
        counts["metadata"],
        counts["folder"],
        counts["file"],
        counts["missing"],
    )
