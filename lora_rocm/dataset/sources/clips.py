"""Clips: folders of numbered images, each of which is one sample with an axis of frames."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lora_rocm.dataset.images.image_io import (
    MAX_IMAGE_BYTES,
    ImageHeader,
    UnreadableImage,
    read_header,
    readable_extensions,
)
from lora_rocm.dataset.skipped_files import Patterns
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.recipe.schema import ResolvedSource

NUMBERED = re.compile(r"(.*?)([0-9]+)")
LENGTH_BYTES = 8


def in_videos(relatives: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The samples of a walk: a sub-folder with several images, all of them numbered, is one sample and replaces them.

    ``relatives``: as ``folders.Folder.relatives``.
    """
    of_folder: dict[str, list[tuple[str, str]]] = {}
    for relative, real in relatives:
        of_folder.setdefault(real.rpartition("/")[0], []).append((relative, real))
    found = []
    for folder, images in of_folder.items():
        numbered = all(NUMBERED.fullmatch(os.path.splitext(real)[0].rpartition("/")[2]) for _, real in images)
        if folder and numbered and len(images) > 1:
            found.append((images[0][0].rpartition("/")[0], folder))
        else:
            found += images
    return sorted(found)


def frames_of(video: Path, root: Path, options: ResolvedSource) -> list[Path]:
    """The frames of a clip, in the order of their numbers, without frames that ``options`` exclude.

    ``root``: the source's folder; ``exclude`` and ``include`` are relative to it.

    Raises:
        OSError: the folder cannot be read.
    """
    wanted, above = readable_extensions(), video.relative_to(root).as_posix()
    exclude, include = Patterns(options.exclude), Patterns(options.include)
    found = []
    for path in video.iterdir():
        number, relative = NUMBERED.fullmatch(path.stem), f"{above}/{path.name}"
        if number is None or path.suffix.lower() not in wanted or path.name.startswith("."):
            continue
        if exclude.fit(relative) or (options.include and not include.fit(relative)) or path.is_dir():
            continue
        found.append((int(number[2]), path.name, path))
    return [path for _, _, path in sorted(found)]


def read_video(video: Path, root: Path, options: ResolvedSource) -> tuple[ImageHeader, int, int]:
    """The header that all frames of a clip share, and the numbers of used and unused frames.

    The largest possible one of ``options.lengths`` is used. Arguments: see ``frames_of``.

    Raises:
        UnreadableImage: it has fewer frames, one of them cannot be read, or they have several sizes.
    """
    try:
        frames = frames_of(video, root, options)
    except OSError as error:
        raise UnreadableImage(str(error.strerror)) from error
    lengths = options.lengths
    count = max((length for length in lengths if length <= len(frames)), default=0)
    if not count:
        raise UnreadableImage(f"it has {len(frames)} frames, but data.frames needs at least {min(lengths)}")
    headers = [read_header(frame) for frame in frames[:count]]
    for header, frame in zip(headers, frames, strict=False):
        if header.size != headers[0].size:
            sizes = " and ".join(f"{width}x{height}" for width, height in (headers[0].size, header.size))
            raise UnreadableImage(f"its frames have several sizes ({sizes}, from {frame.name} on)")
    return headers[0], count, len(frames) - count


def video_bytes(video: Path, root: Path, options: ResolvedSource, count: int) -> bytes:
    """The undecoded bytes of the first frames of a clip, each after its length, for decoding and hashing.

    ``count``: number of frames. Other arguments: see ``frames_of``.

    Raises:
        OSError: they cannot be read.
    """
    contents = [read_plain(frame, MAX_IMAGE_BYTES) for frame in frames_of(video, root, options)[:count]]
    return b"".join(len(content).to_bytes(LENGTH_BYTES, "little") + content for content in contents)


def frames_in(content: bytes) -> Iterator[bytes]:
    """The frames in ``video_bytes``."""
    at = 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        yield content[start:at]
