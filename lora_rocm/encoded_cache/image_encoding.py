"""Runs one encoder: loads it when the first sample needs it, and recovers from out-of-memory errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_rocm.dataset.entry_spec import IMAGE
from lora_rocm.dataset.progress import Progress
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.encoder_speed import watched
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, ImageEntry, LookupResult
from lora_rocm.encoded_cache.prefetch import BackgroundWriter
from lora_rocm.errors import MachineError
from lora_rocm.rules.mitigations import change_event

if TYPE_CHECKING:
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encode, Encoder, Inputs, Tensors

CPU = torch.device("cpu")


class Filling(ExitStack):
    """Encodes images. Entries wait until a check passes; another thread then writes them.

    Use it in a ``with`` block. At the end of the block, all entries that passed the check are written.
    """

    def __init__(self, encoder: Encoder, encoding: Encoding, progress: Progress) -> None:
        super().__init__()
        self._encoder, self._encoding, self._progress = encoder, encoding, progress
        self._behind = self.enter_context(BackgroundWriter())
        self._loaded: LoadedEncoder | None = None
        self._made = dict[bytes, bool]()  # entry key -> encoded in tiles; copies of an image are encoded once

    def add(self, wanted: EncodeRequest, lookup: LookupResult) -> LookupResult:
        """Encode the missing entries of a sample. Return the sample's hash and its updated entries.

        Raises:
            DataError, StorageError, MachineError: see ``Caches.fill_images``.
        """
        entries, place = [], shown(wanted.sample.location)
        for number, entry in enumerate(lookup.entries):
            pixels_CHW, short = lookup.pixels[number] if lookup.pixels else None, bytes.fromhex(entry.whole_key)
            if pixels_CHW is None or short in self._made:
                self._progress.skip(1)
                entries.append(_made(entry, self._made[short]) if entry.fault else entry)
                continue
            entries.append(self._encoded(entry, pixels_CHW, place))
            self._made[short] = self._encoding.tiles
            self._progress.step()
        return LookupResult(lookup.sha256, tuple(entries))

    def _encoded(self, entry: ImageEntry, pixels_CHW: Tensor, place: str) -> ImageEntry:
        if self._loaded is None:
            self._loaded = LoadedEncoder(self._encoder, self._encoding)
            self.enter_context(self._loaded.held)
        tensors = self._loaded(entry.inputs(pixels_CHW), place)
        now = _made(
            entry, self._encoding.tiles
        )  # after the first image that did not fit, all images are encoded in tiles
        put, name = self._encoding.write_in_background, self._encoder.entry.name
        self._loaded.held.add(partial(put, self._behind, name, now.key, tensors, place, entry.fault))
        return now


def _made(entry: ImageEntry, in_tiles: bool) -> ImageEntry:
    """Return the entry in its state after encoding, without its fault."""
    return replace(entry, fault="", in_tiles=in_tiles and entry.tiled_key is not None)


class LoadedEncoder:
    """An encoder with its weights on the device.

    If memory runs out, an image encoder switches to tiles. A caption encoder switches to streaming its weights, and if
    this is not enough, to the CPU. Neither switches back.
    """

    def __init__(self, encoder: Encoder, encoding: Encoding) -> None:
        self._encoder, self._encoding, self._device = encoder, encoding, encoding.device
        encoding.cache.writing = encoder.entry.name
        self._reads_image = encoder.entry.has_views
        self._load()
        self.held = encoding.pending_writes(lambda: self._placement)

    def _load(self) -> None:
        door = self._encoding.opened_placement(self._device)
        try:
            self._load_through(door)
            return
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error)
            if full is None or self._reads_image or self._device.type == "cpu":
                raise
        del door
        self._take_less()

    def _load_through(self, placement: Placement) -> None:
        tiled = self._encoder.in_tiles() if self._encoding.tiles else None
        self._placement = placement
        encode = (tiled if tiled is not None else self._encoder).load(placement)
        self._encode: Encode = encode
        if self._encoder.entry.inputs == (IMAGE,):
            notice = self._encoding.context.notice
            one_image = watched(lambda pixels_CHW: encode({IMAGE: pixels_CHW}), self._device, notice)
            self._encode = lambda inputs: one_image(inputs[IMAGE])

    def __call__(self, inputs: Inputs, place: str) -> Tensors:
        """Encode one sample. Return its tensors, keyed by name. ``place``: the sample's name in messages.

        Raises:
            MachineError: the sample does not fit into memory, even after recovery.
        """
        try:
            return self._encode(inputs)
        except (RuntimeError, MemoryError) as error:
            full = out_of_memory(error)
            if full is None:
                raise
        if not self._reads_image:
            if self._device.type == "cpu":
                raise full
            self.held.settle()  # check with the weights that encoded the pending entries
            self._take_less()
        else:
            self._go_to_tiles(full, inputs, place)
        return self(inputs, place)

    def _take_less(self) -> None:
        """Reload a caption encoder so that it needs less GPU memory: with streamed weights, or else on the CPU."""
        streaming = self._placement.streaming()
        self._forget()
        empty_pools()
        if streaming is not None:
            try:
                self._load_through(streaming)
                return
            except (RuntimeError, MemoryError) as error:
                if out_of_memory(error) is None:
                    raise
            del streaming
            self._forget()
            empty_pools()
        self._device = CPU
        name = self._encoder.entry.name
        self._encoding.context.notice(
            f"The encoder of {name} does not fit into the GPU's memory, so it runs on the CPU."
        )
        self._load_through(self._encoding.opened_placement(CPU))

    def _go_to_tiles(self, full: MachineError, inputs: Mapping[str, Tensor | str], place: str) -> None:
        """Reload the encoder so that it works in tiles.

        Raises:
            MachineError: the encoder already works in tiles, or cannot do so.
        """
        if self._encoding.tiles or self._encoder.in_tiles() is None:
            pixels_CHW = next(value for value in inputs.values() if isinstance(value, Tensor))
            height, width = pixels_CHW.shape[1:]
            raise MachineError(
                full.code,
                f"{full.what} An image of {width}x{height} does not fit, not even in tiles.",
                where=f"{place}: {full.where}",
                fix="Close other programs that use the GPU, or lower data.resolution. Or encode on the CPU: use --set "
                "runtime.device=cpu until training begins; encoded images stay in the cache.",
            )
        self._encoding.tiles = True
        self._encoding.context.emit(change_event("image-tiling", "out-of-memory"))
        self.held.settle()  # check with the weights that encoded the pending entries
        self._forget()
        empty_pools()
        self._load_through(self._encoding.opened_placement(self._device))

    def _forget(self) -> None:
        """Free the encoder's weights, even if it is only partly loaded."""
        for name in ("_encode", "_placement"):
            vars(self).pop(name, None)
