"""Clips: folders of numbered images. Each folder is one sample with an axis of frames."""

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
    """Replace numbered images by clips.

    A sub-folder becomes a clip if it has several images and all of them are numbered.

    Args:
        relatives: pairs of printable and real relative path of each image, as in ``folders.Folder.relatives``.

    Returns:
        The sorted pairs of all samples: the folder of each clip, and the remaining images.
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
    """Return the files of a clip's frames in the order of their numbers, without those that ``options`` exclude.

    Args:
        video: the clip's folder.
        root: the source's folder. The patterns of ``exclude`` and ``include`` are relative to it.
        options: options of the source.

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
    """Read a clip's header. For arguments see ``frames_of``.

    The clip is cut to the greatest length in ``options.lengths`` for which it has enough frames.

    Returns:
        The header that all used frames share, the number of used frames, and the number of unused frames.

    Raises:
        UnreadableImage: the clip has too few frames, a frame cannot be read, or the frames differ in size.
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
            raise UnreadableImage(f"its frames differ in size ({sizes}, from {frame.name} on)")
    return headers[0], count, len(frames) - count


def video_bytes(video: Path, root: Path, options: ResolvedSource, count: int) -> bytes:
    """Return the undecoded bytes of a clip's first frames, for decoding and hashing.

    Each frame is prefixed by its length in bytes. ``count``: number of frames. For the other arguments see
    ``frames_of``.

    Raises:
        OSError: a file cannot be read.
    """
    contents = [read_plain(frame, MAX_IMAGE_BYTES) for frame in frames_of(video, root, options)[:count]]
    return b"".join(len(content).to_bytes(LENGTH_BYTES, "little") + content for content in contents)


def frames_in(content: bytes) -> Iterator[bytes]:
    """Yield the undecoded bytes of each frame. ``content``: bytes from ``video_bytes``."""
    at = 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        yield content[start:at]
