"""Prepares images for an encoder: reads, hashes, decodes and crops each one once. Runs in prefetch threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from lora_rocm.cache_store.hash_memory import FileState, HashMemory
from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.images.image_io import resized_crop
from lora_rocm.dataset.images.views import PLAIN, ImageView, colour_change, recoloured, view_geometry
from lora_rocm.dataset.sources.clips import frames_in
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.dataset.sources.sample_image import image_bytes, load_image
from lora_rocm.dataset.sources.scan import Sample
from lora_rocm.encoded_cache.cache import image_parts
from lora_rocm.errors import DataError, LoraRocmError, Problem

if TYPE_CHECKING:
    from PIL import Image

DECODED_BYTES, PIXEL_BYTES = 6, 12
"""Bytes per pixel of the file during decoding (RGB and a scaled copy), and bytes per pixel of an encoder's input."""


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Request for the cache entries of a sample.

    views: the views (crop, mirroring, colours) of the image to encode.
    captions: captions to encode together with each view; (None,) if the encoder reads only images.
    sha256: hash of the bytes that the entries were encoded from; empty before encoding.
    """

    sample: Sample
    geometry: Geometry
    views: tuple[ImageView, ...] = (PLAIN,)
    sha256: str = ""
    captions: tuple[str | None, ...] = (None,)

    @property
    def reads(self) -> str:
        """Name of the encoder input that is read: IMAGE, or the name of a companion."""
        return IMAGE

    @property
    def file(self) -> Path | None:
        """Path of the file that is read, or None if it is a dataset row."""
        return self.sample.location if isinstance(self.sample.location, Path) else None

    def hashed(self) -> str:
        """Return the hash of the bytes that the entries were encoded from, or "" if it is unknown."""
        return self.sha256

    def read(self) -> bytes:
        """Return the undecoded bytes.

        Raises:
            DataError: the bytes cannot be read.
        """
        return image_bytes(self.sample)

    def decoded(self, content: bytes) -> Image.Image:
        """Decode the bytes, and return the image in its upright orientation.

        Raises:
            DataError: the image cannot be used.
        """
        return load_image(self.sample, content)

    def geometry_of(self, view: ImageView) -> Geometry:
        """Return the scaling and the crop of one view."""
        return view_geometry(self.geometry, self.sample, view)

    def tensor(self, image: Image.Image, view: ImageView) -> Tensor:
        """Return the encoder's input for one view of a decoded image. For plain images this is pixels_CHW.

        Raises:
            DataError: the crop contains nothing usable, such as an entirely black mask.
        """
        pixels = resized_crop(image, self.geometry_of(view), view.flip)
        return pixels_of(recoloured(pixels, colour_change(self.sample, view)))

    def tensors(self, content: bytes, views: Iterable[ImageView]) -> dict[ImageView, Tensor]:
        """Decode the bytes once, and return ``tensor`` for each of the views.

        Raises:
            DataError: see ``decoded`` and ``tensor``.
        """
        image = self.decoded(content)
        return {view: self.tensor(image, view) for view in views}

    def parts(self, sha256: str, view: ImageView) -> tuple[Any, ...]:
        """Return the parts of an entry's key that identify the view. ``sha256``: hash of the bytes that are read."""
        return image_parts(sha256, self.geometry_of(view), view.flip, colour_change(self.sample, view))

    @property
    def num_bytes(self) -> int:
        """Estimated memory use in bytes, from decoding until the end of encoding."""
        height, width = self.geometry.target_hw
        decoded = self.sample.width * self.sample.height * DECODED_BYTES
        return decoded + self.num_entries * height * width * PIXEL_BYTES * max(self.sample.frames, 1)

    @property
    def num_entries(self) -> int:
        return len(self.views) * len(self.captions)


@dataclass(frozen=True, slots=True)
class VideoWanted(EncodeRequest):
    """Request for the cache entries of a clip.

    All frames get the same crop. The encoder's input is pixels_FCHW.
    """

    @property
    def file(self) -> Path | None:
        return None

    def tensors(self, content: bytes, views: Iterable[ImageView]) -> dict[ImageView, Tensor]:
        frames: dict[ImageView, list[Tensor]] = {view: [] for view in views}
        for frame in frames_in(content):  # one at a time, so that only one decoded frame is in memory
            image = self.decoded(frame)
            for view, made in frames.items():
                made.append(self.tensor(image, view))
        return {view: torch.stack(made) for view, made in frames.items()}


@runtime_checkable
class ReadsCompanion(Protocol):
    """An encoder that reads a companion of the image, such as its mask, instead of the image."""

    def companion_of(self, image: EncodeRequest) -> EncodeRequest:
        """Return the request for the image's companion."""


def read_by(encoder: object, images: Sequence[EncodeRequest]) -> Sequence[EncodeRequest]:
    """Return what an encoder reads: the images' companions if it reads companions, otherwise the images."""
    return _Companions(images, encoder) if isinstance(encoder, ReadsCompanion) else images


class _Companions(Lazy[EncodeRequest]):
    """Sequence of the images' companions, built on access."""

    def __init__(self, images: Sequence[EncodeRequest], encoder: ReadsCompanion) -> None:
        self._images, self._encoder = images, encoder

    def __len__(self) -> int:
        return len(self._images)

    def _made(self, start: int, stop: int) -> Sequence[EncodeRequest]:
        return [self._encoder.companion_of(image) for image in self._images[start:stop]]


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """One cache entry of a sample's image.

    whole_key: key of the entry if the image is encoded as a whole.
    tiled_key: key of the entry if the image is encoded in tiles; None if the encoder cannot tile.
    reads: name of the encoder's input, next to a possible caption.
    fault: fault of the entry; empty if there is none.
    in_tiles: whether the entry is, or will be, encoded in tiles.
    """

    view: ImageView
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
        """Return the encoder's inputs by name. ``tensor``: result of ``EncodeRequest.tensor`` for the entry's view."""
        return {self.reads: tensor} if self.caption is None else {self.reads: tensor, CAPTION: self.caption}


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Result of looking up an image in the cache, or of reading an image for encoding.

    sha256: hash of the image's bytes; empty if unknown.
    entries: the image's entries; empty if the hash is unknown.
    file: state of the image file when it was read, with which to remember the hash; None if it was not read from a
        file.
    pixels: encoder input for each entry with a fault, None for each intact entry. Empty if nothing was decoded.
    problem: reason why the image cannot be used, or None.
    passing: whether the problem may be temporary.
    """

    sha256: str = ""
    entries: tuple[ImageEntry, ...] = ()
    file: FileState | None = None
    pixels: tuple[Tensor | None, ...] = ()
    problem: Problem | None = None
    passing: bool = False


EntriesOf = Callable[[EncodeRequest, str], tuple[ImageEntry, ...]]


def pixels_of(image: Image.Image) -> Tensor:
    """Convert an RGB image to a contiguous pixels_CHW: float32 in [-1, 1]."""
    pixels_CHW = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)).astype(np.float32)
    pixels_CHW /= np.float32(127.5)
    pixels_CHW -= np.float32(1.0)
    return torch.from_numpy(pixels_CHW)  # numpy above, because torch would start threads in each of our threads


def lookup_all(memory: HashMemory, entries_of: EntriesOf, samples: Sequence[EncodeRequest]) -> list[LookupResult]:
    """Look up the entries of samples in the cache. Return one result per sample. Fast if the cache is filled.

    Image files are not read. If the hash of an image is not remembered, its result has no entries. Dataset rows are
    read and hashed.
    """
    return [_lookup(memory, entries_of, wanted) for wanted in samples]


def _lookup(memory: HashMemory, entries_of: EntriesOf, wanted: EncodeRequest) -> LookupResult:
    try:
        if wanted.file is not None:
            sha256 = memory.recall(FileState.of(wanted.file)) or ""
        else:
            sha256 = hash_of(wanted.read())
        return LookupResult(sha256, entries_of(wanted, sha256) if sha256 else ())
    except (OSError, DataError) as error:
        return _unusable(wanted, error)


def made_ready(entries_of: EntriesOf, wanted: EncodeRequest) -> LookupResult:
    """Read an image, and look up its entries. If an entry is missing or damaged, decode and crop the image.

    Raises:
        LoraRocmError: the cache cannot be read.
        MemoryError, RuntimeError: memory ran out. A note of the error names the image.
    """
    try:
        file = FileState.of(wanted.file) if wanted.file is not None else None
        content = wanted.read()
        sha256 = hash_of(content)
        entries = entries_of(wanted, sha256)
        if not any(entry.fault for entry in entries):
            return LookupResult(sha256, entries, file)
        # Decode it, and crop the views that have a missing or bad entry.
        faulty = [view for view in wanted.views if any(entry.fault and entry.view == view for entry in entries)]
        views = wanted.tensors(content, faulty)
        del content
        return LookupResult(sha256, entries, file, tuple(views[e.view] if e.fault else None for e in entries))
    except (OSError, DataError) as error:
        return _unusable(wanted, error)
    except LoraRocmError:
        raise
    except (MemoryError, RuntimeError) as error:
        error.add_note(f"while this image was prepared: {shown(wanted.file or wanted.sample.location)}")
        raise


def _unusable(wanted: EncodeRequest, error: OSError | DataError) -> LookupResult:
    """Return the result for an image that cannot be read.

    ``passing`` is set if an error of the operating system or a lack of memory is the root cause.
    """
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    system = isinstance(cause, OSError) and cause.errno is not None  # Pillow's own OSErrors have no errno
    passing = system or isinstance(cause, MemoryError)
    if isinstance(error, DataError):
        return LookupResult(problem=Problem(error.where, error.what, error.fix), passing=passing)
    what = f"The image cannot be read: {error.strerror}."
    fix = "Restore the file or remove it."
    return LookupResult(problem=Problem(shown(wanted.file or wanted.sample.location), what, fix), passing=passing)


def hash_of(content: bytes) -> str:
    """Return the SHA-256 of an image's undecoded bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
