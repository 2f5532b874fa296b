"""One image on its way to an encoder: read once, hashed, decoded and cut. Threads do this ahead of the encoder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lora_rocm.cache_files.hash_memory import FileState, HashMemory
from lora_rocm.dataset.buckets import Geometry
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.dataset.folders import shown
from lora_rocm.dataset.image_io import cut
from lora_rocm.dataset.scan import Sample, image_bytes, load_image
from lora_rocm.errors import DataError, LoraRocmError, Problem
from lora_rocm.latent_cache.cache import image_parts

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
    def reads(self) -> str:
        """What its entries are made from: of ``entry_spec.INPUTS``."""
        return IMAGE

    @property
    def file(self) -> Path | None:
        """What is read, if it is a file of its own."""
        return self.sample.location if isinstance(self.sample.location, Path) else None

    def hashed(self) -> str:
        """The hash of the bytes that its entries were made from; empty if they are not known."""
        return self.sha256

    def read(self) -> bytes:
        """The undecoded bytes of what is read.

        Raises:
            DataError: it cannot be read.
        """
        return image_bytes(self.sample)

    def decoded(self, content: bytes) -> Image.Image:
        """What was read, upright.

        Raises:
            DataError: it cannot be used.
        """
        return load_image(self.sample, content)

    def tensor(self, image: Image.Image, flip: bool) -> Tensor:
        """What the encoder takes of one view: here pixels_CHW.

        Raises:
            DataError: nothing is left of it.
        """
        return pixels_of(cut(image, self.geometry, flip))

    def parts(self, sha256: str, flip: bool) -> tuple[Any, ...]:
        """What says which view is encoded, for the key of its entry; ``sha256``: of what is read."""
        return image_parts(sha256, self.geometry, flip)

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
    reads: what it is made from, beside the caption.
    in_tiles: which of the two lies in the cache, or will. fault: what is wrong with that one, if anything.
    """

    flip: bool
    caption: str | None
    whole_key: str
    tiled_key: str | None
    reads: str = IMAGE
    fault: str = ""
    in_tiles: bool = False

    @property
    def key(self) -> str:
        return self.tiled_key if self.in_tiles and self.tiled_key is not None else self.whole_key

    def inputs(self, tensor: Tensor) -> Mapping[str, Tensor | str]:
        """What its encoder takes, with the ``Wanted.tensor`` of its view."""
        return {self.reads: tensor} if self.caption is None else {self.reads: tensor, CAPTION: self.caption}


@dataclass(frozen=True, slots=True)
class Looked:
    """What is known of a sample's image without reading it, or (with ``pixels``) after.

    sha256, entries: empty if the hash is not known. file: what the hash is to be remembered by.
    pixels: ``Wanted.tensor`` of each entry that has a fault.
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
    try:
        if wanted.file is not None:
            sha256 = memory.recall(FileState.of(wanted.file)) or ""
        else:
            sha256 = hash_of(wanted.read())
    except (OSError, DataError) as error:
        return _unusable(wanted, error)
    return Looked(sha256, entries_of(wanted, sha256) if sha256 else ())


def made_ready(entries_of: EntriesOf, wanted: Wanted) -> Looked:
    """The image read, and decoded and cut if an entry of it is missing or bad.

    Raises:
        LoraRocmError: the cache cannot be read.
        MemoryError, RuntimeError: memory ran out; a note says at which image.
    """
    try:
        file = FileState.of(wanted.file) if wanted.file is not None else None
        content = wanted.read()
        sha256 = hash_of(content)
        entries = entries_of(wanted, sha256)
        if not any(entry.fault for entry in entries):
            return Looked(sha256, entries, file)
        image = wanted.decoded(content)
        del content
        views = {
            flip: wanted.tensor(image, flip)
            for flip in wanted.flips
            if any(entry.fault and entry.flip is flip for entry in entries)
        }
        return Looked(sha256, entries, file, tuple(views[e.flip] if e.fault else None for e in entries))
    except (OSError, DataError) as error:
        return _unusable(wanted, error)
    except LoraRocmError:
        raise
    except (MemoryError, RuntimeError) as error:
        error.add_note(f"while this image was made ready: {shown(wanted.file or wanted.sample.location)}")
        raise


def _unusable(wanted: Wanted, error: OSError | DataError) -> Looked:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    system = isinstance(cause, OSError) and cause.errno is not None  # not Pillow's word about the content
    passing = system or isinstance(cause, MemoryError)
    if isinstance(error, DataError):
        return Looked(problem=Problem(error.where, error.what, error.fix), passing=passing)
    what = f"The image cannot be read: {error.strerror}."
    fix = "Restore the file or take it away."
    return Looked(problem=Problem(shown(wanted.file or wanted.sample.location), what, fix), passing=passing)


def hash_of(content: bytes) -> str:
    """SHA-256 (hex) of an image's undecoded bytes."""
    return hashlib.sha256(content).hexdigest()
