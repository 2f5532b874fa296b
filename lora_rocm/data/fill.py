"""Filling the caches: what is missing is encoded, one item at a time, and the encoders leave memory again.

One at a time because the exact bytes that an encoder makes depend on what else is in its batch; so an entry is the same
whatever was missing, and however often the run was stopped in between.

A picture that does not fit into memory is encoded in tiles, which rounds otherwise: such an entry has a key of its own,
and is taken where there is none of the whole picture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lora_rocm.data.buckets import Geometry
from lora_rocm.data.cache import MISSING, LatentCache, image_key, text_key
from lora_rocm.data.entries import CacheEntryBad
from lora_rocm.data.folders import shown
from lora_rocm.data.pictures import cut
from lora_rocm.data.proven import HeldBack, Look, OpenDoor, plain_door
from lora_rocm.data.samples import Sample, load_image
from lora_rocm.device.encoder_speed import watched
from lora_rocm.device.failure import out_of_memory
from lora_rocm.device.memory import empty_pools
from lora_rocm.errors import DataError, MachineError, Problem

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.families.base import Encoder, Tensors

Report = Callable[[str, int, int, float], None]
"""Called with what, done, total, per_second. It may raise: caching stops there, and goes on there the next time."""

Repaired = Callable[[str, str, str], None]
"""Called with kind, item (picture or caption) and what was wrong, when a damaged entry was encoded again."""

REPORT_EVERY_S = 0.25


@dataclass(frozen=True)
class ImageJob:
    """One picture to encode: what the key stands for. ``tiled_key``: its key if it is encoded in tiles."""

    key: str
    tiled_key: str | None
    sample: Sample
    geometry: Geometry
    flip: bool


class Progress:
    """Passes progress on, at most a few times a second, and always the end."""

    def __init__(self, what: str, total: int, report: Report, done: int = 0) -> None:
        self._what, self._total, self._report = what, total, report
        self._done = self._done_before = done
        self._started = time.perf_counter()
        self._last = float("-inf")

    def step(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        now = time.perf_counter()
        if now - self._last >= REPORT_EVERY_S or self._done == self._total:
            self._last = now
            rate = (self._done - self._done_before) / max(now - self._started, 1e-9)
            self._report(self._what, self._done, self._total, rate)


def pixels_of(image: Image.Image) -> Tensor:
    """pixels_CHW: float32 in [-1, 1], contiguous, from a picture in mode RGB."""
    pixels_HWC = torch.from_numpy(np.array(image, dtype=np.float32))
    return (pixels_HWC / 127.5 - 1.0).permute(2, 0, 1).contiguous()


@dataclass
class Caches:
    """The image and the text cache of one run, with what is needed to make each of their entries again.

    ``tiles``: pictures are encoded in tiles; where memory runs out it becomes true, and ``tiles_needed`` is called.
    ``open_door``: for weights and pictures on their way to a device, and what comes back. ``look``: raises where
    kernels or the encoders' weights are not what they should be; called before the first entry is made and before
    entries are written (see ``proven``), never for none.
    """

    cache: LatentCache
    image_encoder: Encoder
    text_encoder: Encoder
    device: torch.device
    report: Report
    say: Callable[[str], None]
    repaired: Repaired = lambda *facts: None
    tiles: bool = False
    tiles_needed: Callable[[], None] = lambda: None
    open_door: OpenDoor = plain_door
    look: Look | None = None
    _jobs: dict[str, ImageJob] = field(default_factory=dict, init=False)
    _entries: dict[str, str] = field(default_factory=dict, init=False)  # key of a job -> of its entry, if another
    _captions: dict[str, str] = field(default_factory=dict, init=False)

    @cached_property
    def tiled_encoder(self) -> Encoder | None:
        """The image encoder in tiles, where there is such a way."""
        return self.image_encoder.in_tiles()

    def image_job(self, sample: Sample, sha256: str, geometry: Geometry, flip: bool) -> ImageJob:
        """The job whose keys these determine."""
        tiled = self.tiled_encoder
        return ImageJob(
            image_key(sha256, geometry, flip, self.image_encoder.fingerprint),
            image_key(sha256, geometry, flip, tiled.fingerprint) if tiled is not None else None,
            sample,
            geometry,
            flip,
        )

    def entry_key(self, job: ImageJob) -> str:
        """The key of a picture's entry, once the cache is filled."""
        return self._entries.get(job.key, job.key)

    def text_key(self, caption: str) -> str:
        """Key of a caption for this run's text encoder."""
        return text_key(caption, self.text_encoder.fingerprint)

    def fill_images(self, jobs: Sequence[ImageJob]) -> dict[str, Problem]:
        """Encode the pictures that are missing.

        Returns:
            sample key -> why it is set aside, for pictures that could not be decoded.

        Raises:
            DataError: the encoder made values that are not finite.
            StorageError: the cache cannot be written; what is in it stays.
            MachineError: a picture does not fit into memory, not even in tiles; or what ``look`` raises.
        """
        self._jobs.update({job.key: job for job in jobs})
        faults = {key: fault for key, job in self._jobs.items() if (fault := self._image_fault(job))}
        failed = self._encode_images(faults) if faults else {}
        return {
            job.sample.key: Problem(shown(job.sample.location), failed[job.key].what, failed[job.key].fix)
            for job in jobs
            if job.key in failed
        }

    def fill_texts(self, captions: Iterable[str]) -> None:
        """Encode the captions that are missing.

        Raises:
            DataError: the encoder made values that are not finite.
            StorageError: the cache cannot be written; what is in it stays.
        """
        self._captions.update({self.text_key(caption): caption for caption in captions})
        faults = {key: fault for key in self._captions if (fault := self.cache.fault("text", key))}
        if faults:
            self._encode_texts(faults)

    def repair(self, kind: str, key: str, reason: str) -> None:
        """Encode one entry again, under a new name, because it turned out to be bad: ``reason``.

        Raises:
            DataError: the picture can no longer be read.
            StorageError: the cache cannot be written.
        """
        if kind == "text":
            self._encode_texts({key: reason})
            return
        job = next(job for job in self._jobs.values() if key in (job.key, job.tiled_key))
        try:
            image = load_image(job.sample)
        except DataError as error:
            raise DataError(
                "image-unreadable",
                f"The cached picture is damaged and cannot be made again. {error.what}",
                where=error.where,
                fix="Restore the picture, or take it away; then run the same command again.",
            ) from None
        tiled = self.tiled_encoder if key == job.tiled_key else None
        encoder = tiled if tiled is not None else self.image_encoder
        tensors = self._encode_again(encoder, pixels_of(cut(image, job.geometry, job.flip)))
        self._put("image", key, tensors, shown(job.sample.location), reason)

    def _encode_again(self, encoder: Encoder, pixels_CHW: Tensor) -> Tensors:
        """One picture, in the way that its key says; on the CPU where the GPU is full of the model in training."""
        for device in (self.device, torch.device("cpu")):
            empty_pools()
            try:
                return self._made_once(encoder, self.open_door(device), pixels_CHW)
            except (RuntimeError, MemoryError) as error:
                full = out_of_memory(error)
                if full is None:
                    raise
        raise full

    def _made_once(self, encoder: Encoder, door: DeviceTransfer, pixels_CHW: Tensor) -> Tensors:
        encode, held = encoder.load(door), self._held_back(door)
        tensors = encode(pixels_CHW)
        held.add(lambda: None)  # what follows keeps it
        held.settle()
        return tensors

    def _held_back(self, door: DeviceTransfer) -> HeldBack:
        look = self.look
        return HeldBack(None if look is None else lambda: look(door))

    def text_lookup(self, caption: str) -> Tensors:
        """The cached tensors of a caption or prompt of this run, without a batch dimension, on the CPU.

        Raises:
            DataError: it is not one of this run's.
        """
        key = self.text_key(caption)
        if key not in self._captions:
            raise DataError(
                "prompt-not-cached",
                "This prompt was not encoded when the run started.",
                where=repr(caption),
                fix="Add it to sample.prompts and start the run again with --resume latest.",
            )
        try:
            return self.cache.get("text", key, self.text_encoder.outputs).tensors
        except CacheEntryBad as error:
            self.repair("text", key, str(error))
            return self.cache.get("text", key, self.text_encoder.outputs).tensors

    def _image_fault(self, job: ImageJob) -> str:
        """What is wrong with a picture's entry; nothing (empty) where there is one, of the whole or in tiles."""
        fault = self.cache.fault("image", job.key)
        if fault == MISSING and job.tiled_key is not None:
            fault = self.cache.fault("image", job.tiled_key)
            if not fault:
                self._entries[job.key] = job.tiled_key
        return fault

    def _put(self, kind: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        self.cache.put(kind, key, tensors, item)
        if fault != MISSING:
            self.repaired(kind, item, fault)

    def _encode_images(self, faults: Mapping[str, str]) -> dict[str, Problem]:
        """Encode and write; the pictures that cannot be decoded, by key. The weights go when this returns."""
        jobs = [self._jobs[key] for key in faults]
        encode = _Fitting(self)
        progress = Progress("images", len(self._jobs), self.report, done=len(self._jobs) - len(jobs))
        failed: dict[str, Problem] = {}
        try:
            with encode.held as held:
                for _, group in groupby(jobs, key=lambda job: job.sample.key):  # both mirror images from one decoding
                    same_picture = list(group)
                    try:
                        image = load_image(same_picture[0].sample)
                    except DataError as error:
                        failed.update({job.key: Problem(error.where, error.what, error.fix) for job in same_picture})
                        progress.step(len(same_picture))
                        continue
                    for job in same_picture:
                        pixels_CHW, place = pixels_of(cut(image, job.geometry, job.flip)), shown(job.sample.location)
                        tensors = encode(pixels_CHW, place)
                        if self.tiles and job.tiled_key is not None:
                            self._entries[job.key] = job.tiled_key
                        held.add(partial(self._put, "image", self.entry_key(job), tensors, place, faults[job.key]))
                        progress.step()
        finally:
            del encode, held
            empty_pools()
        return failed

    def _encode_texts(self, faults: Mapping[str, str]) -> None:
        door = self.open_door(self.device)
        encode, held = self.text_encoder.load(door), self._held_back(door)
        progress = Progress("captions", len(self._captions), self.report, len(self._captions) - len(faults))
        try:
            with held:
                for key, fault in faults.items():
                    caption = self._captions[key]
                    held.add(partial(self._put, "text", key, encode(caption), repr(caption), fault))
                    progress.step()
        finally:
            del encode, held, door
            empty_pools()


class _Fitting:
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
