"""Filling the caches: what is missing is encoded, one item at a time, and the encoders leave memory again.

One at a time because the exact bytes that an encoder makes depend on what else is in its batch; so an entry is the same
whatever was missing, and however often the run was stopped in between.

While the encoder has one picture, threads read, hash, decode and cut the next ones, and another writes what is made
(``data/ahead.py``); neither order nor bytes depend on them.

A picture that does not fit into memory is encoded in tiles, which rounds otherwise: such an entry has a key of its own,
and is taken where there is none of the whole picture.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_rocm.data.ahead import Behind, ahead
from lora_rocm.data.cache import MISSING, HashMemory, LatentCache, image_key, text_key
from lora_rocm.data.entries import CacheEntryBad
from lora_rocm.data.filling import Filling
from lora_rocm.data.folders import shown
from lora_rocm.data.pictures import cut, quiet, readable_formats
from lora_rocm.data.progress import Progress, Report
from lora_rocm.data.proven import HeldBack, Look, OpenDoor, plain_door
from lora_rocm.data.ready import Entry, ImageJob, Looked, Picture, hash_of, looked_at, made_ready, pixels_of
from lora_rocm.data.samples import Sample, image_bytes, load_image
from lora_rocm.device.failure import out_of_memory
from lora_rocm.device.memory import afterwards, empty_pools
from lora_rocm.errors import DataError, Problem

if TYPE_CHECKING:
    from PIL import Image

    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.families.base import Encoder, Tensors

Repaired = Callable[[str, str, str], None]
"""Called with kind, item (picture or caption) and what was wrong, when a damaged entry was encoded again."""

Found = Callable[[int, Looked], None]
"""Called with the index of a picture and what is known of it, once all its entries are there."""

LOOKED_AT_ONCE = 32  # pictures that a thread looks for in the cache at a time


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
    all_could_be_read: bool = field(default=True, init=False)  # what was set aside is so for good
    _pictures: Sequence[Picture] = field(default=(), init=False)
    _captions: Iterable[str] = field(default=(), init=False)

    @cached_property
    def tiled_encoder(self) -> Encoder | None:
        """The image encoder in tiles, where there is such a way."""
        return self.image_encoder.in_tiles()

    def jobs_of(self, picture: Picture, sha256: str) -> tuple[ImageJob, ...]:
        """The entries of a picture whose bytes have this hash."""
        tiled, geometry = self.tiled_encoder, picture.geometry
        return tuple(
            ImageJob(
                image_key(sha256, geometry, flip, self.image_encoder.fingerprint),
                image_key(sha256, geometry, flip, tiled.fingerprint) if tiled is not None else None,
                picture.sample,
                geometry,
                flip,
            )
            for flip in picture.flips
        )

    def text_key(self, caption: str) -> str:
        """Key of a caption for this run's text encoder."""
        return text_key(caption, self.text_encoder.fingerprint)

    def belong(self, pictures: Sequence[Picture], captions: Iterable[str]) -> None:
        """These are all of the run: what ``repair`` and ``text_lookup`` are asked for is among them."""
        self._pictures, self._captions = pictures, captions

    def fill_images(
        self, pictures: Sequence[Picture], memory: HashMemory | None = None, found: Found = lambda index, looked: None
    ) -> dict[str, Problem]:
        """Encode the pictures that are missing.

        Args:
            pictures: all of the run; kept for ``repair``, which wants their hashes to be known by then.
            memory: of the hashes of files.
            found: gets each picture, in no order, with its hash and the keys of its entries.

        Returns:
            sample key -> why it is set aside, for pictures that could not be read.

        Raises:
            DataError: the encoder made values that are not finite.
            StorageError: the cache cannot be written; what is in it stays.
            MachineError: a picture does not fit into memory, not even in tiles; or what ``look`` raises.
        """
        self._pictures = pictures
        memory = HashMemory(self.cache.root) if memory is None else memory
        memory.begin()
        readable_formats()  # Pillow's readers are loaded here, not by the first two threads at once
        failed: dict[str, Problem] = {}
        missing, there = array("q"), 0
        with quiet:
            for index, looked in enumerate(self._looked_at(pictures, memory)):
                if looked.problem is not None:
                    failed[pictures[index].sample.key] = looked.problem
                    self.all_could_be_read &= not looked.passing
                elif looked.entries and not any(entry.fault for entry in looked.entries):
                    found(index, looked)
                    there += len(looked.entries)
                else:
                    missing.append(index)
            if missing:
                self._encode_images(_Missing(pictures, missing), there, memory, found, failed)
        return failed

    def fill_texts(self, captions: Iterable[str]) -> None:
        """Encode the captions that are missing.

        Args:
            captions: all of the run; gone through again, and kept for ``repair``.

        Raises:
            DataError: the encoder made values that are not finite.
            StorageError: the cache cannot be written; what is in it stays.
        """
        self._captions = captions
        seen, missing = set[bytes](), dict[int, str]()
        for index, caption in enumerate(captions):
            key = self.text_key(caption)
            if (short := bytes.fromhex(key)) not in seen:
                seen.add(short)
                if fault := self.cache.fault("text", key):
                    missing[index] = fault
        if missing:
            faulty = ((caption, missing[index]) for index, caption in enumerate(captions) if index in missing)
            self._encode_texts(faulty, len(missing), len(seen))

    def repair(self, kind: str, key: str, reason: str) -> None:
        """Encode one entry again, under a new name, because it turned out to be bad: ``reason``.

        Raises:
            DataError: the picture can no longer be read.
            StorageError: the cache cannot be written.
        """
        if kind == "text":
            caption = next(caption for caption in self._captions if self.text_key(caption) == key)
            tensors, place = self._encode_again(self.text_encoder, caption), repr(caption)
        else:
            tensors, place = self._picture_again(key)
        with Behind() as behind:
            self.put_behind(behind, kind, key, tensors, place, reason)

    def _picture_again(self, key: str) -> tuple[Tensors, str]:
        """Of a picture's entry, and where the picture is."""
        hashed = (picture for picture in self._pictures if picture.sha256)
        jobs = ((job, picture.sha256) for picture in hashed for job in self.jobs_of(picture, picture.sha256))
        job, sha256 = next((job, sha256) for job, sha256 in jobs if key in (job.key, job.tiled_key))
        try:
            image = _image_as_before(job.sample, sha256)
        except DataError as error:
            raise DataError(
                "image-unreadable",
                f"The cached picture is damaged and cannot be made again. {error.what}",
                where=error.where,
                fix="Restore the picture, or take it away; then run the same command again.",
            ) from None
        tiled = self.tiled_encoder if key == job.tiled_key else None
        encoder = tiled if tiled is not None else self.image_encoder
        return self._encode_again(encoder, pixels_of(cut(image, job.geometry, job.flip))), shown(job.sample.location)

    def _encode_again(self, encoder: Encoder, item: Tensor | str) -> Tensors:
        """One picture or caption; on the CPU where the GPU is full of the model in training."""
        for device in (self.device, torch.device("cpu")):
            empty_pools()
            try:
                return self._made_once(encoder, self.open_door(device), item)
            except (RuntimeError, MemoryError) as error:
                full = out_of_memory(error)
                if full is None:
                    raise
        raise full

    def _made_once(self, encoder: Encoder, door: DeviceTransfer, item: Tensor | str) -> Tensors:
        encode, held = encoder.load(door), self._held_back(door)
        tensors = encode(item)
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
        try:
            return self.cache.get("text", key, self.text_encoder.outputs).tensors
        except CacheEntryBad as error:
            if caption not in self._captions:
                raise DataError(
                    "prompt-not-cached",
                    "This prompt was not encoded when the run started.",
                    where=repr(caption),
                    fix="Add it to sample.prompts and start the run again with --resume latest.",
                ) from None
            self.repair("text", key, str(error))
            return self.cache.get("text", key, self.text_encoder.outputs).tensors

    def _entries_of(self, picture: Picture, sha256: str) -> tuple[Entry, ...]:
        """What there is of a picture: of each entry that of the whole, or the one in tiles where there is no other."""
        entries = []
        for job in self.jobs_of(picture, sha256):
            fault, key = self.cache.fault("image", job.key), job.key
            if fault == MISSING and job.tiled_key is not None:
                fault = self.cache.fault("image", job.tiled_key)
                key = job.key if fault else job.tiled_key
            entries.append(Entry(job, key, fault))
        return tuple(entries)

    def _looked_at(self, pictures: Sequence[Picture], memory: HashMemory) -> Iterator[Looked]:
        progress = Progress("hashes", len(pictures), self.report)
        starts = range(0, len(pictures), LOOKED_AT_ONCE)
        parts = ([pictures[at] for at in range(start, min(start + LOOKED_AT_ONCE, len(pictures)))] for start in starts)
        with closing(ahead(partial(looked_at, memory, self._entries_of), parts, lambda part: 0)) as looked:
            for each in chain.from_iterable(looked):
                yield each
                progress.step()

    def put_behind(self, behind: Behind, kind: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        """Have an entry checked, fingerprinted and written by the thread behind, and told where it was a bad one."""
        tell = partial(self.repaired, kind, item, fault) if fault != MISSING else lambda: None
        behind.add(partial(self.cache.put, kind, key, tensors, item), tell)

    def _encode_images(
        self, missing: _Missing, there: int, memory: HashMemory, found: Found, failed: dict[str, Problem]
    ) -> None:
        """Encode and write what is missing beside what is ``there``. The weights go when this returns."""
        progress = Progress("images", there + missing.num_entries, self.report, done=there)
        filling = Filling(self, progress)
        ready = ahead(partial(made_ready, self._entries_of), missing, lambda picture: picture.num_bytes)
        with afterwards(empty_pools):
            try:
                with filling, closing(ready):
                    for index, picture, looked in zip(missing.indices, missing, ready, strict=True):
                        if looked.problem is not None:
                            failed[picture.sample.key] = looked.problem
                            self.all_could_be_read &= not looked.passing
                            progress.step(len(picture.flips))
                            continue
                        if looked.file is not None:
                            memory.remember(looked.file, looked.sha256)
                        found(index, filling.add(looked))
            finally:
                del filling

    def _encode_texts(self, missing: Iterable[tuple[str, str]], count: int, total: int) -> None:
        """Encode captions, each with what is wrong with its entry; ``count`` of them, of a ``total``."""
        door = self.open_door(self.device)
        encode, held = self.text_encoder.load(door), self._held_back(door)
        progress = Progress("captions", total, self.report, total - count)
        with afterwards(empty_pools):
            try:
                with Behind() as behind, held:
                    for caption, fault in missing:
                        key, tensors = self.text_key(caption), encode(caption)
                        held.add(partial(self.put_behind, behind, "text", key, tensors, repr(caption), fault))
                        progress.step()
            finally:
                del encode, held, door


def _image_as_before(sample: Sample, sha256: str) -> Image.Image:
    """The picture, if its bytes are those that its key stands for.

    Raises:
        DataError: it cannot be read, or is another one by now: under that key it would be taken for the first for good.
    """
    content = image_bytes(sample)
    if hash_of(content) != sha256:
        what = "The picture has changed since the run began."
        raise DataError("image-changed", what, where=shown(sample.location))
    return load_image(sample, content)


@dataclass(frozen=True)
class _Missing:
    """The pictures at some indices."""

    pictures: Sequence[Picture]
    indices: array[int]

    def __iter__(self) -> Iterator[Picture]:
        return (self.pictures[index] for index in self.indices)

    @property
    def num_entries(self) -> int:
        return sum(len(picture.flips) for picture in self)
