"""The image encoder while a cache is filled: loaded when the first picture wants it, in tiles where it must be."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from lora_rocm.data.ahead import Behind
from lora_rocm.data.folders import shown
from lora_rocm.data.progress import Progress
from lora_rocm.data.proven import HeldBack
from lora_rocm.data.ready import Entry, Looked
from lora_rocm.device.encoder_speed import watched
from lora_rocm.device.failure import out_of_memory
from lora_rocm.device.memory import empty_pools
from lora_rocm.errors import MachineError

if TYPE_CHECKING:
    from lora_rocm.data.fill import Caches
    from lora_rocm.families.base import Tensors


class Filling:
    """Encodes pictures, and hands on what is made: kept back until a look finds all well, then written behind.

    To be used in a ``with`` block, at whose end all is written that a look found well.
    """

    def __init__(self, caches: Caches, progress: Progress) -> None:
        self._caches, self._progress = caches, progress
        self._behind, self._open = Behind(), ExitStack()
        self._encode: Fitting | None = None
        self._made = dict[bytes, bool]()  # key of an entry -> whether in tiles: copies of a picture are encoded once

    def __enter__(self) -> Filling:
        self._open.enter_context(self._behind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, looked: Looked) -> Looked:
        """Encode what a picture lacks; the same with the keys that its entries have now.

        Raises:
            DataError, StorageError, MachineError: as ``Caches.fill_images``.
        """
        entries = []
        for number, entry in enumerate(looked.entries):
            pixels_CHW, short = looked.pixels[number] if looked.pixels else None, bytes.fromhex(entry.job.key)
            if pixels_CHW is None or short in self._made:
                self._progress.skip(1)
                entries.append(_with_key(entry, self._made[short]) if entry.fault else entry)
                continue
            entries.append(self._encoded(entry, pixels_CHW))
            self._made[short] = self._caches.tiles
            self._progress.step()
        return Looked(looked.sha256, tuple(entries))

    def _encoded(self, entry: Entry, pixels_CHW: Tensor) -> Entry:
        if self._encode is None:
            self._encode = Fitting(self._caches)
            self._open.enter_context(self._encode.held)
        place = shown(entry.job.sample.location)
        tensors = self._encode(pixels_CHW, place)
        now = _with_key(entry, self._caches.tiles)  # from one picture that did not fit on, all are made in tiles
        put = self._caches.put_behind
        self._encode.held.add(partial(put, self._behind, "image", now.key, tensors, place, entry.fault))
        return now


def _with_key(entry: Entry, in_tiles: bool) -> Entry:
    """The entry as it has been made."""
    job = entry.job
    return Entry(job, job.tiled_key if in_tiles and job.tiled_key is not None else job.key, "")


class Fitting:
    """The image encoder, loaded; it goes over to tiles, for good, where a picture does not fit into memory."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        look = caches.look
        self._load()
        self.held = HeldBack(None if look is None else lambda: look(self._door))

    def _load(self) -> None:
        caches = self._caches
        tiled = caches.tiled_encoder if caches.tiles else None
        encoder = tiled if tiled is not None else caches.image_encoder
        self._door = caches.open_door(caches.device)
        self._encode = watched(encoder.load(self._door), caches.device, caches.say)

    def __call__(self, pixels_CHW: Tensor, place: str) -> Tensors:
        """Encode a picture. ``place``: what to call it.

        Raises:
            MachineError: it does not fit, not even in tiles.
        """
        try:
            return self._encode(pixels_CHW)
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error)
            if full is None:
                raise
        caches = self._caches
        if caches.tiles or caches.tiled_encoder is None:
            height, width = pixels_CHW.shape[1:]
            raise MachineError(
                full.code,
                f"{full.what} A picture of {width}x{height} does not fit, not even in tiles.",
                where=f"{place}: {full.where}",
                fix="Close other programs that use the GPU, lower data.resolution, or encode on the CPU: --set "
                "runtime.device=cpu, until training begins; what is encoded stays in the cache.",
            )
        caches.tiles = True
        caches.tiles_needed()
        self.held.settle()  # with the weights that made it
        del self._encode, self._door
        empty_pools()
        self._load()
        return self(pixels_CHW, place)
