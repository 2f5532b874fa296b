"""One picture on its way to the encoder: read once, hashed, decoded and cut. This is done in threads, ahead of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lora_rocm.data.buckets import Geometry
from lora_rocm.data.cache import FileState, HashMemory
from lora_rocm.data.folders import shown
from lora_rocm.data.pictures import cut
from lora_rocm.data.samples import Sample, image_bytes, load_image
from lora_rocm.errors import DataError, LoraRocmError, Problem

if TYPE_CHECKING:
    from PIL import Image

DECODED_BYTES, PIXEL_BYTES = 6, 12
"""Of a pixel: of the file's, while it is decoded (RGB, and once more while it is scaled); of the encoder's."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is wanted in the cache.

    flips: as it is, mirrored, or both. sha256: of the bytes that its entries were made from; empty before they are.
    """

    sample: Sample
    geometry: Geometry
    flips: tuple[bool, ...] = (False,)
    sha256: str = ""

    @property
    def num_bytes(self) -> int:
        """About what it takes from decoding to encoding."""
        height, width = self.geometry.target_hw
        decoded = self.sample.width * self.sample.height * DECODED_BYTES
        return decoded + len(self.flips) * height * width * PIXEL_BYTES


@dataclass(frozen=True, slots=True)
class ImageJob:
    """One entry: what its key stands for. ``tiled_key``: its key if it is encoded in tiles."""

    key: str
    tiled_key: str | None
    sample: Sample
    geometry: Geometry
    flip: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a job: its key (that of the whole picture, or in tiles) and what is wrong with it, if anything."""

    job: ImageJob
    key: str
    fault: str


@dataclass(frozen=True, slots=True)
class Looked:
    """What is known of a picture without reading it, or (with ``pixels``) after.

    sha256, entries: empty where the hash is not known. file: what the hash is to be remembered by.
    pixels: pixels_CHW of each entry that has a fault.
    problem: why the picture cannot be used; passing: another time it may be.
    """

    sha256: str = ""
    entries: tuple[Entry, ...] = ()
    file: FileState | None = None
    pixels: tuple[Tensor | None, ...] = ()
    problem: Problem | None = None
    passing: bool = False


EntriesOf = Callable[[Picture, str], tuple[Entry, ...]]


def pixels_of(image: Image.Image) -> Tensor:
    """pixels_CHW: float32 in [-1, 1], contiguous, from a picture in mode RGB."""
    pixels_CHW = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32)
    pixels_CHW /= np.float32(127.5)
    pixels_CHW -= np.float32(1.0)
    return torch.from_numpy(pixels_CHW)  # by numpy: torch would start its own threads beside each of ours


def looked_at(memory: HashMemory, entries_of: EntriesOf, pictures: Sequence[Picture]) -> list[Looked]:
    """What is there of each, as far as it shows without reading a file that is known: for warm caches."""
    return [_looked_at(memory, entries_of, picture) for picture in pictures]


def _looked_at(memory: HashMemory, entries_of: EntriesOf, picture: Picture) -> Looked:
    location = picture.sample.location
    try:
        if isinstance(location, Path):
            sha256 = memory.recall(FileState.of(location)) or ""
        else:
            sha256 = hash_of(image_bytes(picture.sample))
    except (OSError, DataError) as error:
        return _unusable(picture, error)
    return Looked(sha256, entries_of(picture, sha256) if sha256 else ())


def made_ready(entries_of: EntriesOf, picture: Picture) -> Looked:
    """The picture read, and decoded and cut where an entry of it is missing or bad.

    Raises:
        LoraRocmError: the cache cannot be read.
        MemoryError, RuntimeError: memory ran out; a note says at which picture.
    """
    sample = picture.sample
    try:
        file = FileState.of(sample.location) if isinstance(sample.location, Path) else None
        content = image_bytes(sample)
        sha256 = hash_of(content)
        entries = entries_of(picture, sha256)
        if not any(entry.fault for entry in entries):
            return Looked(sha256, entries, file)
        image = load_image(sample, content)
        del content
        pixels = (pixels_of(cut(image, picture.geometry, e.job.flip)) if e.fault else None for e in entries)
        return Looked(sha256, entries, file, tuple(pixels))
    except (OSError, DataError) as error:
        return _unusable(picture, error)
    except LoraRocmError:
        raise
    except (MemoryError, RuntimeError) as error:
        error.add_note(f"while this picture was made ready: {shown(sample.location)}")
        raise


def _unusable(picture: Picture, error: OSError | DataError) -> Looked:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    system = isinstance(cause, OSError) and cause.errno is not None  # not Pillow's word about the content
    passing = system or isinstance(cause, MemoryError)
    if isinstance(error, DataError):
        return Looked(problem=Problem(error.where, error.what, error.fix), passing=passing)
    what = f"The picture cannot be read: {error.strerror}."
    fix = "Restore the file or take it away."
    return Looked(problem=Problem(shown(picture.sample.location), what, fix), passing=passing)


def hash_of(content: bytes) -> str:
    """SHA-256 (hex) of a picture's undecoded bytes."""
    return hashlib.sha256(content).hexdigest()
