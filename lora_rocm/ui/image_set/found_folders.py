"""Finds the folders with images below the folders that the user named."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.dataset.images.image_io import readable_extensions
from lora_rocm.dataset.sources.file_kinds import companion_match
from lora_rocm.dataset.sources.folders import lists_run

MAX_DEPTH, MAX_FOLDERS, MAX_FOUND = 5, 5000, 200


@dataclass(frozen=True)
class FoundFolder:
    """A folder that contains images. cover: the file name of its first image."""

    path: Path
    num_images: int
    cover: str


def folders_with_images(root: Path) -> Iterator[FoundFolder]:
    """Yield folders that contain images themselves, the upper ones first.

    Run directories, hidden folders, and folders of masks or control images are skipped. The search is bounded in depth
    and number.
    """
    wanted, pending, num_seen, num_found = readable_extensions(), [(root, 0)], 0, 0
    while pending and num_seen < MAX_FOLDERS and num_found < MAX_FOUND:
        folder, depth = pending.pop(0)
        num_seen += 1
        try:
            with os.scandir(folder) as listed:
                entries = sorted((each for each in listed if not each.name.startswith(".")), key=lambda each: each.name)
        except OSError:
            continue
        if lists_run(entries) or companion_match(f"{folder.name}/x.png") is not None:
            continue
        names = [each.name for each in entries if _is_image(each, wanted)]
        if names:
            num_found += 1
            yield FoundFolder(folder, len(names), names[0])
        if depth < MAX_DEPTH:
            pending += [(folder / each.name, depth + 1) for each in entries if each.is_dir(follow_symlinks=False)]


def _is_image(entry: os.DirEntry[str], wanted: Collection[str]) -> bool:
    """Whether a file is an image, and not the mask or control image of one."""
    is_named = os.path.splitext(entry.name)[1].lower() in wanted and companion_match(entry.name) is None
    return is_named and entry.is_file()
