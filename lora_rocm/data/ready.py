"""One image on its way to an encoder: read once, hashed, decoded and cut. Threads do this ahead of the encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lora_rocm.data.buckets import Geometry
from lora_rocm.data.cache import FileState, HashMemory
from lora_rocm.data.entry_spec import CAPTION, IMAGE
from lora_rocm.data.folders import shown
from lora_rocm.data.pictures import cut
from lora_rocm.data.samples import Sample, image_bytes, load_image
from lora_rocm.errors import DataError, LoraRocmError, Problem

if TYPE_CHECKING:
    from PIL import Image

DECODED_BYTES, PIXEL_BYTES = 6, 12
"""Bytes for one pixel of the file while it is decoded (RGB, and once more while it is scaled), and of the encoder's."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A sample whose entries are wanted in the cache.

    flips: the views: as it is, mirrored, or both.
    captions: for entries that are made from captions too; else None alone.
    sha256: of the bytes that its entries were made from; empty before they are.
    """

    sample: Sample
    geometry: Geometry
    flips: tuple[bool, ...] = (False,)
    sha256: str = ""
    captions: tuple[str | None, ...] = (None,)

    @property
    def num_bytes(self) -> int:
        """Estimated memory from decoding to encoding."""
        height, width = self.geometry.target_hw
        decoded = self.sample.width * self.sample.height * DECODED_BYTES
        return decoded + self.num_entries * height * width * PIXEL_BYTES

    @property
    def num_entries(self) -> int:
        return len(self.flips) * len(self.captions)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a sample that is made from an image.

    whole_key: its key if the image is encoded whole; tiled_key: if it is encoded in tiles and can be.
    in_tiles: which of the two lies in the cache, or will. fault: what is wrong with that one, if anything.
    """

    flip: bool
    caption: str | None
    whole_key: str
    tiled_key: str | None
    fault: str = ""
    in_tiles: bool = False

    @property
    def key(self) -> str:
        return self.tiled_key if self.in_tiles and self.tiled_key is not None else self.whole_key

    def inputs(self, pixels_CHW: Tensor) -> Mapping[str, Tensor | str]:
        """What its encoder takes."""
        return {IMAGE: pixels_CHW} if self.caption is None else {IMAGE: pixels_CHW, CAPTION: self.caption}


@dataclass(frozen=True, slots=True)
class Looked:
    """What is known of a sample's image without reading it, or (with ``pixels``) after.

    sha256, entries: empty if the hash is not known. file: what the hash is to be remembered by.
    pixels: pixels_CHW of each entry that has a fault.
    problem: why the image cannot be used; passing: it may be usable another time.
    """

    sha256: str = ""
    entries: tuple[Entry, ...] = ()
    file: FileState | None = None
    pixels: tuple[Tensor | None, ...] = ()
    problem: Problem | None = None
    passing: bool = False


EntriesOf = Callable[[Wanted, str], tuple[Entry, ...]]


def pixels_of(image: Image.Image) -> Tensor:
    """pixels_CHW: float32 in [-1, 1], contiguous, from an image in mode RGB."""
    pixels_CHW = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32)
    pixels_CHW /= np.float32(127.5)
    pixels_CHW -= np.float32(1.0)
    return torch.from_numpy(pixels_CHW)  # by numpy: torch would start its own threads beside each of ours


def looked_at(memory: HashMemory, entries_of: EntriesOf, samples: Sequence[Wanted]) -> list[Looked]:
    """What the cache holds of each sample, without reading a file whose hash is known: for warm caches."""
    return [_looked_at(memory, entries_of, wanted) for wanted in samples]


def _looked_at(memory: HashMemory, entries_of: EntriesOf, wanted: Wanted) -> Looked:
    location = wanted.sample.location
    try:
        if isinstance(location, Path):
            sha256 = memory.recall(FileState.of(location)) or ""
        else:
            sha256 = hash_of(image_bytes(wanted.sample))
    except (OSError, DataError) as error:
        return _unusable(wanted, error)
    return Looked(sha256, entries_of(wanted, sha256) if sha256 else ())


def made_ready(entries_of: EntriesOf, wanted: Wanted) -> Looked:
    """The image read, and decoded and cut if an entry of it is missing or bad.

    Raises:
        LoraRocmError: the cache cannot be read.
        MemoryError, RuntimeError: memory ran out; a note says at which image.
    """
    sample = wanted.sample
    try:
        file = FileState.of(sample.location) if isinstance(sample.location, Path) else None
        content = image_bytes(sample)
        sha256 = hash_of(content)
        entries = entries_of(wanted, sha256)
        if not any(entry.fault for entry in entries):
            return Looked(sha256, entries, file)
        image = load_image(sample, content)
        del content
        views = {
            flip: pixels_of(cut(image, wanted.geometry, flip))
            for flip in wanted.flips
            if any(entry.fault and entry.flip is flip for entry in entries)
        }
        return Looked(sha256, entries, file, tuple(views[e.flip] if e.fault else None for e in entries))
    except (OSError, DataError) as error:
        return _unusable(wanted, error)
    except LoraRocmError:
        raise
    except (MemoryError, RuntimeError) as error:
        error.add_note(f"while this image was made ready: {shown(sample.location)}")
        raise


def _unusable(wanted: Wanted, error: OSError | DataError) -> Looked:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    system = isinstance(cause, OSError) and cause.errno is not None  # not Pillow's word about the content
    passing = system or isinstance(cause, MemoryError)
    if isinstance(error, DataError):
        return Looked(problem=Problem(error.where, error.what, error.fix), passing=passing)
    what = f"The picture cannot be read: {error.strerror}."
    fix = "Restore the file or take it away."
    return Looked(problem=Problem(shown(wanted.sample.location), what, fix), passing=passing)


def hash_of(content: bytes) -> str:
    """SHA-256 (hex) of an image's undecoded bytes."""
    return hashlib.sha256(content).hexdigest()
