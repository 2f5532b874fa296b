"""Fills the caches: encodes missing entries one item at a time, one encoder after the other.

Items are not batched, because an encoder's exact output depends on the other items of its batch. Without batches, an
entry's bytes do not depend on which other entries are missing, or on interruptions. Each encoder is freed before the
next is loaded.

While an encoder works on one image, threads read, hash, decode and crop the next images. Another thread writes entries
(``encoded_cache/prefetch.py``). Neither order nor bytes depend on the threads.

An image that does not fit into memory is encoded in tiles, which changes the rounding. The tiled entry therefore has
its own key. It is used if there is no entry of the whole image.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from lora_rocm.cache_store.entry_file import CacheEntryBad
from lora_rocm.cache_store.hash_memory import HashMemory
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.images.image_io import readable_formats
from lora_rocm.dataset.progress import Progress
from lora_rocm.dataset.sources.folders import shown
from lora_rocm.device.allocator import afterwards, empty_pools
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.encoded_cache.cache import MISSING, entry_key
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.image_encoding import CPU, Filling, LoadedEncoder
from lora_rocm.encoded_cache.image_preprocess import (
    EncodeRequest,
    ImageEntry,
    LookupResult,
    hash_of,
    lookup_all,
    made_ready,
    read_by,
)
from lora_rocm.encoded_cache.prefetch import BackgroundWriter, ahead
from lora_rocm.errors import DataError, MachineError, Problem, resume_advice

if TYPE_CHECKING:
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encoder, Inputs, Tensors

__all__ = ["Caches", "Encoding", "Found"]

Found = Callable[[int, str, LookupResult], None]
"""Callback that receives (index of a sample, kind of entry, result).

It is called when all entries of that kind exist for the sample.
"""

LOOKED_AT_ONCE = 32  # samples that a thread looks up in the cache at a time


@dataclass
class Caches:
    """The caches of one run, and the inputs from which ``repair`` can encode each entry again.

    encoders: the encoders of the run, one per kind of entry.
    all_could_be_read: False if an image was skipped because of an error that may be temporary.
    """

    encoding: Encoding
    encoders: Sequence[Encoder]
    all_could_be_read: bool = field(default=True, init=False)
    _samples: Sequence[EncodeRequest] = field(default=(), init=False)
    _captions: Iterable[str] = field(default=(), init=False)
    _pairs: Iterable[EncodeRequest] = field(default=(), init=False)

    def of_images(self) -> list[Encoder]:
        """Return the encoders that read images but no captions."""
        return [e for e in self.encoders if e.entry.has_views and not e.entry.has_captions]

    def of_captions(self) -> list[Encoder]:
        """Return the encoders that read captions but no images."""
        return [e for e in self.encoders if e.entry.has_captions and not e.entry.has_views]

    def of_pairs(self) -> list[Encoder]:
        """Return the encoders that read an image together with a caption."""
        return [e for e in self.encoders if e.entry.has_captions and e.entry.has_views]

    def caption_key(self, encoder: Encoder, caption: str) -> str:
        """Return the cache key of a caption."""
        return entry_key(encoder.entry.name, (caption,), encoder.fingerprint)

    def set_samples(
        self, samples: Sequence[EncodeRequest], captions: Iterable[str], pairs: Iterable[EncodeRequest] = ()
    ) -> None:
        """Set all samples and captions of the run. ``repair`` and ``text_lookup`` search them.

        ``pairs``: the samples together with their captions, for encoders that read both.
        """
        self._samples, self._captions, self._pairs = samples, captions, pairs

    def fill_images(
        self,
        samples: Sequence[EncodeRequest],
        memory: HashMemory | None = None,
        found: Found = lambda index, entry, lookup: None,
        encoders: Sequence[Encoder] | None = None,
    ) -> dict[str, Problem]:
        """Encode the missing entries of images.

        Args:
            samples: all samples of the run.
            memory: hashes of files remembered from earlier runs; None to use those in the cache folder.
            found: callback for each sample and kind of entry, called in no particular order.
            encoders: encoders to run, or None for all that read images without captions.

        Returns:
            The problems of images that could not be read and are skipped, keyed by sample key.

        Raises:
            DataError: an encoder returned values that are not finite.
            StorageError: the cache cannot be written; existing entries remain.
            MachineError: an image does not fit into memory, not even in tiles; or an error of ``Encoding.check``.
        """
        if encoders is None:
            encoders, self._samples = self.of_images(), samples
        memory = HashMemory(self.encoding.cache.root) if memory is None else memory
        memory.begin()
        readable_formats()  # loads Pillow's readers now, before two threads would do so at once
        failed: dict[str, Problem] = {}
        for encoder in encoders:
            _Images(self, encoder, read_by(encoder, samples), memory, found, failed).fill()
        return failed

    def fill_texts(self, captions: Iterable[str]) -> None:
        """Encode the missing entries of captions.

        Args:
            captions: all captions of the run. They are iterated several times, and kept for ``repair``.

        Raises:
            DataError: an encoder returned values that are not finite.
            StorageError: the cache cannot be written; existing entries remain.
        """
        self._captions = captions
        for encoder in self.of_captions():
            name, seen, missing = encoder.entry.name, set[bytes](), dict[int, str]()
            for index, caption in enumerate(captions):
                key = self.caption_key(encoder, caption)
                if (short := bytes.fromhex(key)) not in seen:
                    seen.add(short)
                    if fault := self.encoding.cache.fault(name, key):
                        missing[index] = fault
            if missing:
                faulty = ((caption, missing[index]) for index, caption in enumerate(captions) if index in missing)
                self._encode_texts(encoder, faulty, len(missing), len(seen))

    def repair(self, entry: str, key: str, reason: str) -> None:
        """Encode a damaged or missing entry again, and write it under a new file name.

        Args:
            entry: kind of the entry.
            key: key of the entry.
            reason: the entry's fault, which is reported as an event.

        Raises:
            DataError: the image can no longer be read.
            StorageError: the cache cannot be written.
        """
        encoder = next(encoder for encoder in self.encoders if encoder.entry.name == entry)
        if encoder.entry.has_views:
            tensors, place = self._image_again(encoder, key)
        else:
            caption = next(caption for caption in self._captions if self.caption_key(encoder, caption) == key)
            tensors, place = self._encode_again(encoder, {CAPTION: caption}), repr(caption)
        with BackgroundWriter() as behind:
            self.encoding.write_in_background(behind, entry, key, tensors, place, reason)

    def text_lookup(self, caption: str) -> Tensors:
        """Return the cached tensors of a caption or prompt of this run: on the CPU, without a batch dimension.

        A damaged or missing entry is encoded again.

        Raises:
            DataError: the entry is damaged or missing, and the caption does not belong to this run.
        """
        tensors: Tensors = {}
        for encoder in self.of_captions():
            tensors |= self._lookup(encoder, caption)
        return tensors

    def mask_bytes(self, encoder: Encoder, caption: str) -> int:
        """Return the size in bytes of a caption's ``caption_mask``. It grows with the length of the caption.

        A damaged or missing entry is encoded again.
        """
        entry, key, cache = encoder.entry, self.caption_key(encoder, caption), self.encoding.cache
        try:
            return cache.num_bytes(entry.name, key, entry.caption_mask)
        except CacheEntryBad as error:
            self.repair(entry.name, key, str(error))
            return cache.num_bytes(entry.name, key, entry.caption_mask)

    def _lookup(self, encoder: Encoder, caption: str) -> Tensors:
        entry, key, cache = encoder.entry, self.caption_key(encoder, caption), self.encoding.cache
        try:
            return cache.get(entry.name, key, entry.tensors).tensors
        except CacheEntryBad as error:
            if caption not in self._captions:
                raise DataError(
                    "prompt-not-cached",
                    "This prompt was not encoded when the run started.",
                    where=repr(caption),
                    **resume_advice("Add it to sample.prompts and start the run again with --resume latest."),
                ) from None
            self.repair(entry.name, key, str(error))
            return cache.get(entry.name, key, entry.tensors).tensors

    def _image_again(self, encoder: Encoder, key: str) -> tuple[Tensors, str]:
        """Encode the entry of an image again. Return its tensors, and the location of the image for messages."""
        known = self._pairs if encoder.entry.has_captions else read_by(encoder, self._samples)
        # Find the sample and view of this key, and read the image.
        hashed = ((wanted, sha256) for wanted in known if (sha256 := wanted.hashed()))
        all_entries = ((*pair, entry) for pair in hashed for entry in entries_of(encoder, *pair))
        found = next((each for each in all_entries if key in (each[2].whole_key, each[2].tiled_key)), None)
        try:
            if found is None:
                raise _changed(encoder.entry.name)
            wanted, sha256, entry = found
            tensors = wanted.tensors(_bytes_as_before(wanted, sha256), [entry.view])
        except DataError as error:
            raise DataError(
                "image-unreadable",
                f"A cache entry is damaged, and its image cannot be encoded again. {error.what}",
                where=error.where,
                fix="Restore the image or remove it, then run the same command again.",
            ) from None
        # Encode it as before: in tiles if the key is the tiled entry's key.
        tiled = encoder.in_tiles() if key == entry.tiled_key else None
        inputs = entry.inputs(tensors[entry.view])
        place = shown(wanted.sample.location)
        return self._encode_again(tiled if tiled is not None else encoder, inputs), place

    def _encode_again(self, encoder: Encoder, inputs: Inputs) -> Tensors:
        """Encode one item. If the GPU lacks memory for it next to the model in training, encode it on the CPU."""
        full: MachineError | None = None
        for device in (self.encoding.device, CPU):
            empty_pools()
            try:
                return self._made_once(encoder, self.encoding.opened_placement(device), inputs)
            except (RuntimeError, MemoryError) as error:
                full = out_of_memory(error)
                if full is None:
                    raise
        assert full is not None, "one of the devices was tried"
        raise full

    def _made_once(self, encoder: Encoder, placement: Placement, inputs: Inputs) -> Tensors:
        encode, held = encoder.load(placement), self.encoding.pending_writes(lambda: placement)
        tensors = encode(inputs)
        held.add(lambda: None)  # only triggers the check; the caller writes the entry
        held.settle()
        return tensors

    def _encode_texts(self, encoder: Encoder, missing: Iterable[tuple[str, str]], count: int, total: int) -> None:
        """Encode the captions that have a missing or damaged entry.

        Args:
            encoder: encoder of the captions.
            missing: pairs (caption, fault of its entry).
            count: number of pairs.
            total: number of all captions, for the progress.
        """
        encoding, name = self.encoding, encoder.entry.name
        loaded = LoadedEncoder(encoder, encoding)
        progress = Progress("captions", total, encoding.report, total - count)
        with afterwards(empty_pools):
            try:
                with BackgroundWriter() as behind, loaded.held as held:
                    for caption, fault in missing:
                        key, tensors = self.caption_key(encoder, caption), loaded({CAPTION: caption}, repr(caption))
                        held.add(
                            partial(encoding.write_in_background, behind, name, key, tensors, repr(caption), fault)
                        )
                        progress.step()
            finally:
                del loaded, held


@dataclass
class _Images:
    """Fills the entries of one encoder that reads images."""

    caches: Caches
    encoder: Encoder
    samples: Sequence[EncodeRequest]
    memory: HashMemory
    found: Found
    failed: dict[str, Problem]

    def fill(self) -> None:
        """Look up all samples in the cache, then encode the missing entries."""
        name, missing, num_missing, there = self.encoder.entry.name, array("q"), 0, 0
        for index, looked in enumerate(self._lookups()):
            if looked.problem is not None:
                self._skip(self.samples[index], looked)
            elif looked.entries and not any(entry.fault for entry in looked.entries):
                self.found(index, name, looked)
                there += len(looked.entries)
            else:
                missing.append(index)
                num_missing += self.samples[index].num_entries
        if missing:
            self._encode(missing, num_missing, there)

    def _skip(self, wanted: EncodeRequest, lookup: LookupResult) -> None:
        if lookup.problem is not None and wanted.sample.key not in self.failed:
            self.failed[wanted.sample.key] = lookup.problem
        self.caches.all_could_be_read &= not lookup.passing

    def _entries_of(self, wanted: EncodeRequest, sha256: str) -> tuple[ImageEntry, ...]:
        """Return a sample's entries with their faults. The tiled entry is used if only that exists."""
        cache, name = self.caches.encoding.cache, self.encoder.entry.name
        entries = []
        for entry in entries_of(self.encoder, wanted, sha256):
            fault, in_tiles = cache.fault(name, entry.whole_key), False
            if fault == MISSING and entry.tiled_key is not None:
                fault = cache.fault(name, entry.tiled_key)
                in_tiles = not fault
            entries.append(replace(entry, fault=fault, in_tiles=in_tiles))
        return tuple(entries)

    def _lookups(self) -> Iterator[LookupResult]:
        samples = self.samples
        progress = Progress("hashes", len(samples), self.caches.encoding.report)
        starts = range(0, len(samples), LOOKED_AT_ONCE)
        parts = (samples[start : start + LOOKED_AT_ONCE] for start in starts)
        with closing(ahead(partial(lookup_all, self.memory, self._entries_of), parts, lambda part: 0)) as looked:
            for each in chain.from_iterable(looked):
                yield each
                progress.step()

    def _encode(self, missing: array[int], num_missing: int, there: int) -> None:
        """Encode and write the missing entries of samples. The encoder's weights are freed at the end.

        Args:
            missing: indices of the samples.
            num_missing: number of entries of these samples.
            there: number of entries that exist already, for the progress.
        """
        encoding = self.caches.encoding
        progress = Progress("images", there + num_missing, encoding.report, done=there)
        filling = Filling(self.encoder, encoding, progress)
        all_wanted = (self.samples[index] for index in missing)
        ready = ahead(partial(made_ready, self._entries_of), all_wanted, lambda wanted: wanted.num_bytes)
        with afterwards(empty_pools):
            try:
                with filling, closing(ready):
                    for index, looked in zip(missing, ready, strict=True):
                        wanted = self.samples[index]
                        if looked.problem is not None:
                            self._skip(wanted, looked)
                            progress.step(wanted.num_entries)
                            continue
                        if looked.file is not None:
                            self.memory.remember(looked.file, looked.sha256)
                        self.found(index, self.encoder.entry.name, filling.add(wanted, looked))
            finally:
                del filling


def entries_of(encoder: Encoder, wanted: EncodeRequest, sha256: str) -> tuple[ImageEntry, ...]:
    """Return a sample's entries for one encoder: one for each view and, if the encoder reads captions, each caption.

    ``sha256``: hash of the file that the encoder reads.
    """
    tiled, name = encoder.in_tiles(), encoder.entry.name
    entries = []
    for view in wanted.views:
        image = wanted.parts(sha256, view)
        for caption in wanted.captions:
            parts = image if caption is None else (*image, caption)
            whole_key = entry_key(name, parts, encoder.fingerprint)
            tiled_key = entry_key(name, parts, tiled.fingerprint) if tiled is not None else None
            entries.append(ImageEntry(view, caption, whole_key, tiled_key, wanted.reads))
    return tuple(entries)


def _bytes_as_before(wanted: EncodeRequest, sha256: str) -> bytes:
    """Return the undecoded bytes of an image, if they still have the hash that is part of the key.

    Raises:
        DataError: the image cannot be read, or has changed. Encoding it under the old key would corrupt the cache.
    """
    content = wanted.read()
    if hash_of(content) != sha256:
        raise _changed(shown(wanted.sample.location))
    return content


def _changed(where: str) -> DataError:
    return DataError(
        "image-changed",
        "The image, or a file that belongs to it, has changed since the run began.",
        where=where,
        fix="Start the run again, and do not change the images until they are cached.",
    )
