"""Filling the caches: what is missing is encoded, one item at a time, and the encoders leave memory again.

One at a time because the exact bytes that an encoder makes depend on what else is in its batch; so an entry is the same
whatever was missing, and however often the run was stopped in between.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from lora_rocm.data.samples import Sample, load_image
from lora_rocm.device.encoder_speed import watched
from lora_rocm.errors import DataError, Problem

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.families.base import Encoder, Tensors

Report = Callable[[str, int, int, float], None]
"""Called with what, done, total, per_second. It may raise: caching stops there, and goes on there the next time."""

Repaired = Callable[[str, str, str], None]
"""Called with kind, item (picture or caption) and what was wrong, when a damaged entry was encoded again."""

REPORT_EVERY_S = 0.25


@dataclass(frozen=True)
class ImageJob:
    """One picture to encode: what the key stands for."""

    key: str
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
    """The image and the text cache of one run, with what is needed to make each of their entries again."""

    cache: LatentCache
    image_encoder: Encoder
    text_encoder: Encoder
    device: torch.device
    report: Report
    say: Callable[[str], None]
    repaired: Repaired = lambda *facts: None
    _jobs: dict[str, ImageJob] = field(default_factory=dict, init=False)
    _captions: dict[str, str] = field(default_factory=dict, init=False)

    def image_job(self, sample: Sample, sha256: str, geometry: Geometry, flip: bool) -> ImageJob:
        """The job whose key these determine."""
        return ImageJob(image_key(sha256, geometry, flip, self.image_encoder.fingerprint), sample, geometry, flip)

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
        """
        self._jobs.update({job.key: job for job in jobs})
        faults = self._faults("image", self._jobs)
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
        faults = self._faults("text", self._captions)
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
        failed = self._encode_images({key: reason})
        if key in failed:
            raise DataError(
                "image-unreadable",
                f"The cached picture is damaged and cannot be made again. {failed[key].what}",
                where=failed[key].where,
                fix="Restore the picture, or take it away; then run the same command again.",
            )

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

    def _faults(self, kind: str, keys: Iterable[str]) -> dict[str, str]:
        """Key -> what is wrong, of the entries that have to be encoded."""
        return {key: fault for key in keys if (fault := self.cache.fault(kind, key))}

    def _put(self, kind: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        self.cache.put(kind, key, tensors, item)
        if fault != MISSING:
            self.repaired(kind, item, fault)

    def _encode_images(self, faults: Mapping[str, str]) -> dict[str, Problem]:
        """Encode and write; the pictures that cannot be decoded, by key. The weights go when this returns."""
        jobs = [self._jobs[key] for key in faults]
        encode = watched(self.image_encoder.load(self.device), self.device, self.say)
        progress = Progress("images", len(self._jobs), self.report, done=len(self._jobs) - len(jobs))
        failed: dict[str, Problem] = {}
        try:
            for _, group in groupby(jobs, key=lambda job: job.sample.key):  # both mirror images from one decoding
                same_picture = list(group)
                try:
                    image = load_image(same_picture[0].sample)
                except DataError as error:
                    failed.update({job.key: Problem(error.where, error.what, error.fix) for job in same_picture})
                    progress.step(len(same_picture))
                    continue
                for job in same_picture:
                    tensors = encode(pixels_of(cut(image, job.geometry, job.flip)))
                    self._put("image", job.key, tensors, shown(job.sample.location), faults[job.key])
                    progress.step()
        finally:
            del encode
            _free(self.device)
        return failed

    def _encode_texts(self, faults: Mapping[str, str]) -> None:
        encode = self.text_encoder.load(self.device)
        progress = Progress("captions", len(self._captions), self.report, len(self._captions) - len(faults))
        try:
            for key, fault in faults.items():
                caption = self._captions[key]
                self._put("text", key, encode(caption), repr(caption), fault)
                progress.step()
        finally:
            del encode
            _free(self.device)


def _free(device: torch.device) -> None:
    """Give back the memory of weights that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
