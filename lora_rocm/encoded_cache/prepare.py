"""Prepares the data of a recipe: items with all their tensors in the caches."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lora_rocm.cache_store.hash_memory import HashMemory
from lora_rocm.dataset.captions import captions
from lora_rocm.dataset.captions.caption_length import TokenLimit, cut_notice
from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.entry_spec import CAPTION, IMAGE
from lora_rocm.dataset.order.batch_plan import Item
from lora_rocm.dataset.order.regularisation import evened_repeats, unused_notice
from lora_rocm.dataset.progress import QUIET_S, Progress, Report, ignore
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.dataset.rows.row_reference import joined, separated
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.dataset.sources.scan import Cropped, Sample, Samples, geometry_of, groups_of, nothing_left, notify_copies
from lora_rocm.dataset.sources.text_scan import find_samples
from lora_rocm.encoded_cache.controls import control_encoders
from lora_rocm.encoded_cache.encode import Caches
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, LookupResult, ReadsCompanion
from lora_rocm.encoded_cache.inpainting import inpaint_encoder
from lora_rocm.encoded_cache.item_table import (
    AXES,
    AXIS,
    CUT,
    CUT_NUMBERS,
    Items,
    KeyLists,
    UsableSamples,
    axes_of,
    identity,
    samples_in,
)
from lora_rocm.encoded_cache.manifest import Manifest, ManifestStore, SampleStatistics
from lora_rocm.encoded_cache.masks import mask_encoder
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.seeds import fraction
from lora_rocm.foundation.units import count_text

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import EntrySpec
    from lora_rocm.encoded_cache.cache import LatentCache
    from lora_rocm.families.base import Encoder, ModelFamily, Tensors, TextReader
    from lora_rocm.recipe.schema import DataSection, Recipe

MAX_TAGS = 20_000  # tags counted per folder; cut to the most frequent ones at twice as many


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a run.

    items: items to train on.
    held_out: items for the validation loss (no mirroring, shuffling or caption dropout).
    samples: the samples of ``items``, in the same order.
    set_aside: problems of the skipped images.
    text_lookup: function that returns the cached tensors of a preview prompt or of the empty caption.
    repair: function that encodes a damaged entry again; ``loader`` calls it with (kind, key, reason).
    entries: specifications of the entries that each item has.
    items_digest: ``item_table.identity`` of ``items``.
    """

    items: Sequence[Item]
    held_out: Sequence[Item]
    samples: Sequence[Sample]
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    facts: SampleStatistics
    text_lookup: Callable[[str], Tensors]
    repair: Callable[[str, str, str], None]
    entries: tuple[EntrySpec, ...]
    items_digest: str = identity(())

    def identity(self) -> str:
        """Return a hash that changes if a resumed run would train on other samples, or in another order."""
        return self.items_digest


def prepare(recipe: Recipe, family: ModelFamily, encoding: Encoding, facts: SampleStatistics | None = None) -> Prepared:
    """Find the samples, choose their crops, hold out some of them, and fill the caches.

    Args:
        recipe: recipe that defines the data.
        family: the model family, with encoders that fill the caches.
        encoding: cache, device and callbacks for encoding.
        facts: statistics of the samples, if the run no longer needs the samples themselves. Only prompts are then
            encoded, and the result has no items. None in all other runs.

    Raises:
        DataError: the images cannot be used, or an encoder returned values that are not finite.
        StorageError: the cache cannot be written; existing entries remain.
        MachineError: an image does not fit into memory, not even in tiles; or an error of ``Encoding.check``.
    """
    encoders = (
        *run_encoders(recipe, family),
        *encoding.more,
    )  # locates the base model, so it comes before the long work
    entries = tuple(encoder.entry for encoder in encoders)
    caches = Caches(encoding, encoders)
    if facts is not None:
        caches.fill_texts(("", *_prompts(recipe)))
        return Prepared((), (), (), (), (), facts, caches.text_lookup, caches.repair, entries)
    # Load the manifest if it is still valid; otherwise prepare everything and store a new one.
    shelf = ManifestStore(encoding.cache.root, recipe, encoders)
    kept = shelf.recall()
    if kept is None:
        listing = shelf.listing()
        kept = _manifest(recipe, family, caches)
        shelf.keep(kept, listing)
    else:
        caches.fill_texts(("", *_prompts(recipe)))
    # Give the caches all samples and captions, for repairs, and build the items.
    sources = recipe.data.resolved_sources()
    usable = UsableSamples.of_table(kept.batch, sources)
    texts = _Captions(recipe, usable, kept.num_training, encoding.report)
    caches.set_samples(usable if caches.of_images() else (), texts, _Pairs(texts) if caches.of_pairs() else ())
    training, held_out = kept.batch.slice(0, kept.num_training), kept.batch.slice(kept.num_training)
    return Prepared(
        items=Items(training, sources, entries),
        held_out=Items(held_out, sources, entries, held_out=True),
        samples=samples_in(training, sources),
        set_aside=kept.set_aside,
        notices=kept.notices,
        facts=kept.facts,
        text_lookup=caches.text_lookup,
        repair=caches.repair,
        entries=entries,
        items_digest=kept.items_digest,
    )


def _manifest(recipe: Recipe, family: ModelFamily, caches: Caches) -> Manifest:
    """Find, crop, encode and count all samples. Return a new manifest."""
    # Find the samples and encode their images.
    data, limits = recipe.data, family.token_limits()  # reads the tokenizers, so it comes before the long work
    report = caches.encoding.report
    reader = family.texts
    how = {} if reader is None else {"parts": reader.parts}
    found = find_samples(recipe, report, copies=False, **how)  # copies are found below, from the hashes
    cut_N, usable, too_small, cropped = _cut(found.samples, data, caches)
    memory = HashMemory(caches.encoding.cache.root)
    failed = caches.fill_images(usable, memory, usable.found) if caches.of_images() else {}
    set_aside = (*found.set_aside, *too_small, *failed.values())
    if not len(ready_N := usable.ready):
        raise nothing_left(set_aside)
    # Order the samples: training first, then held out.
    copies = _notify_copies(usable, ready_N)
    ordered = _ordered(usable, ready_N, recipe, reader)
    usable, count = ordered.usable, ordered.num_training
    # Encode the captions, count tokens and collect the keys.
    texts = _Captions(recipe, usable, count, report)
    caches.fill_texts(texts)
    _count_tokens(caches, texts)
    captions = _caption_keys(caches, texts, _pair_keys(caches, texts, memory))
    # Build the manifest.
    unused_N = np.setdiff1d(np.arange(len(found.samples)), cut_N[ordered.indices_N])
    said = _notify_cut(limits, texts) if reader is None else (*reader.warnings, *reader.notices)
    notices = (
        *found.notices,
        *cropped,
        *copies,
        *ordered.unused,
        *said,
        *ordered.notices,
    )
    entries = [encoder.entry for encoder in caches.encoders]
    batch = usable.table(entries, captions)
    return Manifest(
        batch,
        count,
        identity(Items(batch.slice(0, count), data.resolved_sources(), entries)),
        set_aside,
        notices,
        _facts(texts),
        other_files=tuple(found.samples.at(unused_N).files_of_datasets()),
        lasting=found.lasting and caches.all_could_be_read,
    )


@dataclass(frozen=True)
class _Ordered:
    """The training samples of a run, followed by the held-out samples.

    usable: the samples; with packing, rows of several training samples.
    num_training: number of training samples or rows.
    num_held_out: number of held-out samples.
    indices_N: indices of the samples before packing.
    unused: notices about samples that are never used.
    notices: other notices.
    """

    usable: UsableSamples
    num_training: int
    num_held_out: int
    indices_N: NDArray[np.int64]
    unused: Sequence[str]
    notices: Sequence[str]


def _ordered(usable: UsableSamples, ready_N: NDArray[np.int64], recipe: Recipe, reader: TextReader | None) -> _Ordered:
    share, is_reg_N, repeats_N = recipe.data.validation_split, usable.samples.is_reg_N, usable.samples.repeats_N
    held_N = _held_out(usable, ready_N[~is_reg_N[ready_N]], share)
    training_N = np.setdiff1d(ready_N, held_N)
    repeats_N[training_N] = evened_repeats(is_reg_N[training_N], repeats_N[training_N])
    unused = unused_notice(len(training_N), int(np.count_nonzero(repeats_N[training_N])))
    training_N = training_N[repeats_N[training_N] > 0]
    order_N = np.concatenate([training_N, held_N])
    rows, count, said = _in_rows(usable.repeated(repeats_N).ordered(order_N), len(training_N), recipe, reader)
    notices = (*_notify_held_out(len(training_N), len(held_N), share), *said)
    return _Ordered(rows, count, len(held_N), order_N, unused, notices)


def lengths_of_texts(recipe: Recipe, reader: TextReader, samples: Samples) -> tuple[Counter[int], int]:
    """Return the number of samples (or packed rows) per epoch by length, and the number of held-out samples.

    Lengths are in tokens, rounded up to the family's multiple. ``samples``: texts split by ``TextReader.parts``.
    """
    usable = UsableSamples.unfilled(samples)
    ordered = _ordered(usable, np.arange(len(samples)), recipe, reader)
    lengths, (axis,) = Counter[int](), recipe.spec.axes
    for sample in islice(ordered.usable.samples, ordered.num_training):
        length = sum(reader.num_tokens(text) for text in separated(sample.caption))
        lengths[-(-length // axis.multiple) * axis.multiple] += sample.repeats
    return lengths, ordered.num_held_out


def texts_in_cache(recipe: Recipe, family: ModelFamily, cache: LatentCache, samples: Samples) -> tuple[int, int]:
    """Return the number of a run's texts that have all their entries in the cache, and the number of all its texts.

    Preview prompts count as texts. ``samples``: texts split by ``TextReader.parts``.
    """
    usable = UsableSamples.unfilled(samples)
    ordered = _ordered(usable, np.arange(len(samples)), recipe, family.texts)
    caches = Caches(Encoding(cache, torch.device("cpu")), run_encoders(recipe, family))
    texts = set(_Captions(recipe, ordered.usable, ordered.num_training, ignore))
    there = sum(
        all(cache.holds(e.entry.name, caches.caption_key(e, text)) for e in caches.of_captions()) for text in texts
    )
    return there, len(texts)


def _in_rows(
    usable: UsableSamples, num_training: int, recipe: Recipe, reader: TextReader | None
) -> tuple[UsableSamples, int, list[str]]:
    """If ``data.packing`` is set, pack the texts of training samples into rows. A row has samples of one source.

    Returns:
        The rows followed by the held-out samples, the number of rows, and notices.
    """
    if not recipe.data.packing or reader is None:
        return usable, num_training, []
    of_source: dict[int, list[tuple[int, int]]] = {}
    for index, sample in enumerate(islice(usable.samples, num_training)):
        of_source.setdefault(sample.source, []).append((index, reader.num_tokens(sample.caption)))
    rows, stored = Samples(usable.samples.sources), usable.samples.stored
    for found in of_source.values():
        for numbers in rows_of([length for _, length in found], recipe.data.max_length):
            samples = [stored[found[number][0]] for number in numbers]
            rows.append(replace(samples[0], caption=joined([sample.caption for sample in samples])))
    count = len(rows)
    for sample in islice(stored, num_training, None):
        rows.append(sample)
    texts, into = count_text(num_training, "text"), count_text(count, "row")
    said = [f"Packed {texts} into {into} of at most {recipe.data.max_length} tokens."] if count else []
    return UsableSamples.unfilled(rows), count, said


def _count_tokens(caches: Caches, texts: _Captions) -> None:
    """Record each text's number of tokens and its share of the loss.

    They are taken from the cached entry, because only the encoder tokenizes and truncates the text.
    """
    for encoder in caches.of_captions():
        entry = encoder.entry
        if not entry.follows_shape:
            continue
        tensor, axis = next((name, spec.dims.index("S")) for name, spec in entry.tensors.items() if "S" in spec.dims)
        for index, (text, *_) in enumerate(texts.of_samples()):
            found = caches.text_lookup(text)
            share = int(found[entry.share].sum()) if entry.share else 1  # on the CPU: no wait for a device
            texts.usable.counted(index, found[tensor].shape[axis], share)


def _pair_keys(caches: Caches, texts: _Captions, memory: HashMemory) -> dict[tuple[str, int], list[str]]:
    """Fill the entries that are encoded from an image together with a caption.

    Returns:
        The keys of the entries, by (kind of entry, index of the sample).

    Raises:
        DataError: an image that was readable before can no longer be read.
    """
    keys = dict[tuple[str, int], list[str]]()

    def found(index: int, entry: str, lookup: LookupResult) -> None:
        texts.usable.hashed(index, lookup.sha256)
        keys[entry, index] = [made.key for made in lookup.entries]

    if encoders := caches.of_pairs():
        for problem in caches.fill_images(_Pairs(texts), memory, found, encoders).values():
            raise DataError("image-unreadable", problem.what, where=problem.where, fix=problem.fix)
    return keys


def _caption_keys(caches: Caches, texts: _Captions, pairs: Mapping[tuple[str, int], list[str]]) -> dict[str, KeyLists]:
    """Return the columns with keys and lengths of all entries that are encoded from captions, by column name."""
    columns = {}
    for encoder in caches.encoders:
        entry = encoder.entry
        if not entry.has_captions:
            continue
        column = columns[f"key {entry.name}"] = KeyLists()
        if entry.has_views:
            for index in range(len(texts.usable)):
                column.append(pairs[entry.name, index])
            continue
        lengths, of_empty = KeyLists(), caches.mask_bytes(encoder, "") if entry.caption_mask else 0
        for captioned in texts.of_samples():
            column.append(caches.caption_key(encoder, text) for text in (*captioned, ""))
            if entry.caption_mask:
                lengths.append_lengths((*(caches.mask_bytes(encoder, text) for text in captioned), of_empty))
        if entry.caption_mask:
            columns[f"length {entry.name}"] = lengths
    return columns


def _cut(
    samples: Samples, data: DataSection, caches: Caches
) -> tuple[NDArray[np.int64], UsableSamples, list[Problem], list[str]]:
    """Choose the crops of all samples.

    Returns:
        Indices of the usable samples, the usable samples, problems of images that are too small, and notices.
    """
    if not any(encoder.entry.has_views for encoder in caches.encoders):
        return np.arange(len(samples)), UsableSamples.unfilled(samples), [], []
    sized = [each for each in caches.encoders if each.entry.keeps_size and isinstance(each, ReadsCompanion)]
    columns = [f"{AXIS}{axis}" for axis in ("h", "w", *axes_of(each.entry for each in sized)[len(AXES) :])]
    indices, rows, too_small, cropped = array("q"), array("i"), list[Problem](), Cropped(data)
    for index, sample in enumerate(samples):
        geometry = geometry_of(sample, data)
        if isinstance(geometry, Problem):
            too_small.append(geometry)
            continue
        indices.append(index)
        rows.extend((*geometry.resized_hw, *geometry.crop_top_left, *geometry.target_hw))
        for encoder in sized:
            rows.extend(encoder.companion_of(EncodeRequest(sample, geometry)).geometry.target_hw)
        cropped.add(sample, geometry)
    cut_N, rows_NR = np.array(indices, np.int64), np.array(rows, np.int32).reshape(-1, CUT_NUMBERS + len(columns))
    axes = {CUT: rows_NR[:, :CUT_NUMBERS], **dict(zip(columns, rows_NR[:, CUT_NUMBERS:].T, strict=True))}
    names = [encoder.entry.name for encoder in caches.of_images()]
    return cut_N, UsableSamples.unfilled(samples.at(cut_N), names, axes), too_small, cropped.notices()


@dataclass(frozen=True)
class _Captions:
    """The captions of all used samples. They are computed on each iteration, because there may be very many.

    usable: samples to train on (``num_training``), then the held-out samples.
    """

    recipe: Recipe
    usable: UsableSamples
    num_training: int
    report: Report

    def __iter__(self) -> Iterator[str]:
        """Iterate over all texts of the run: captions, the empty caption and the preview prompts."""
        return chain(chain.from_iterable(self.of_samples()), ("", *_prompts(self.recipe)))

    def of_samples(self) -> Iterator[tuple[str, ...]]:
        """Yield the captions of each sample: all variants, or for a held-out sample only the prepared caption."""
        progress = Progress("texts", len(self.usable), self.report, quiet_s=QUIET_S)
        for index, sample in enumerate(self.usable.samples):
            yield self.of(index, sample)
            progress.step()

    def of(self, index: int, sample: Sample) -> tuple[str, ...]:
        """Return the captions of one sample."""
        if index >= self.num_training:
            return (captions.prepare(sample.caption, sample.options),)
        data, seed = self.recipe.data, self.recipe.train.seed
        return captions.variants(sample.captions, sample.options, data.caption_variants, seed)


class _Pairs(Lazy[EncodeRequest]):
    """Requests for all samples, each with its captions and the empty caption, built on access."""

    def __init__(self, texts: _Captions) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts.usable)

    def _made(self, start: int, stop: int) -> Sequence[EncodeRequest]:
        return [self._pair(index, wanted) for index, wanted in enumerate(self._texts.usable[start:stop], start)]

    def _pair(self, index: int, wanted: EncodeRequest) -> EncodeRequest:
        captions = (*self._texts.of(index, wanted.sample), "")
        held_out = index >= self._texts.num_training
        return replace(wanted, captions=captions, views=wanted.views[:1] if held_out else wanted.views)


def _held_out(usable: UsableSamples, ready_N: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Return the sorted indices of the samples to hold out."""
    if share == 0.0:
        return ready_N[:0]
    hashes, cut = dict[str, str](), dict[object, list[str]]()
    for index, sample in zip(ready_N.tolist(), usable.samples.at(ready_N), strict=True):
        hashes[sample.key] = usable.sha256(index) or hashlib.sha256(sample.caption.encode()).hexdigest()
        if isinstance(sample.location, DatasetRow) and not usable.sha256(index):
            cut.setdefault((sample.source, sample.location.index), []).append(sample.key)
    for parts in cut.values():  # the parts of a cut text share the last part's hash, so they stay together
        hashes |= dict.fromkeys(parts, hashes[parts[-1]])
    held = choose_held_out(hashes, share)
    return np.array([index for index, key in zip(ready_N.tolist(), hashes, strict=True) if key in held], np.int64)


def _notify_copies(usable: UsableSamples, ready_N: NDArray[np.int64]) -> list[str]:
    """Return a notice if several images have the same content; otherwise an empty list."""
    ready = ready_N.tolist()
    groups = groups_of(bytes.fromhex(usable.sha256(index)) for index in ready)
    return notify_copies(usable.samples.__getitem__, groups, ready) if usable.sha256(ready[0]) else []


def choose_held_out(hashes: dict[str, str], share: float) -> set[str]:
    """Return the keys of the samples to hold out.

    A sample's content hash is mapped to a fraction in [0, 1); the sample is held out if the fraction is below
    ``share``. Only the content decides. So adding or renaming samples does not move other samples, and copies stay
    together. If the training set or the held-out set would be empty, one sample is moved into it, unless ``share`` is 0
    or 1.

    ``hashes``: content hashes, keyed by sample.
    """
    if share in (0.0, 1.0):
        return set(hashes) if share else set()
    places = {key: fraction("held out", sha256) for key, sha256 in hashes.items()}
    cut = min(max(share, min(places.values()) + 1e-12), max(places.values()))
    return {key for key, place in places.items() if place < cut}


def _notify_cut(limits: Sequence[TokenLimit], texts: _Captions) -> tuple[str, ...]:
    """Return a notice if the text encoders truncate captions.

    With shuffling, the order decides which tags are lost.
    """
    samples = enumerate(texts.usable.samples)
    captioned = ((sample.key, texts.of(index, sample)[0]) for index, sample in samples)
    return cut_notice(captioned, limits, texts.recipe.spec.trains_on_texts)


def _notify_held_out(training: int, held: int, share: float) -> tuple[str, ...]:
    if share in (0.0, 1.0):  # 1: data.watched samples
        return ()
    return (f"Validation loss: {count_text(held, 'sample')} of {training + held} held out.",)


def _prompts(recipe: Recipe) -> tuple[str, ...]:
    return (*recipe.sample.texts, recipe.sample.negative_prompt)


def _facts(texts: _Captions) -> SampleStatistics:
    """Count the tags, buckets and folders of the training samples."""
    tags: dict[str, Counter[str]] = {}
    shapes: Counter[SampleShape] = Counter()
    folders: dict[str, dict[str, int]] = {}
    for index, sample in enumerate(islice(texts.usable.samples.stored, texts.num_training)):
        counted = tags.setdefault(sample.folder, Counter())
        if not texts.recipe.spec.trains_on_texts:  # a text has no tags, and LoRA files with these counts get published
            counted.update(captions.tags_of(captions.prepare(sample.caption, sample.options)))
        if len(counted) > 2 * MAX_TAGS:
            tags[sample.folder] = Counter(dict(counted.most_common(MAX_TAGS)))
        shapes[texts.usable.shape(index)] += sample.repeats
        folder = folders.setdefault(sample.folder, {"n_repeats": sample.repeats, "img_count": 0})
        folder["img_count"] += 1
        if sample.options.is_reg:
            folder["num_reg"] = folder.get("num_reg", 0) + sample.repeats
    tag_frequency = {folder: dict(sorted(counter.items())) for folder, counter in sorted(tags.items())}
    return SampleStatistics(
        tag_frequency, dict(sorted(shapes.items(), key=lambda pair: pair[0].axes)), dict(sorted(folders.items()))
    )


def rows_of(lengths: Sequence[int], longest: int) -> list[list[int]]:
    """Pack texts into rows. Return the indices of the texts in each row.

    A row is at most ``longest`` long. Texts are placed from longest to shortest, each into the fullest row with enough
    space (best fit decreasing). A text longer than ``longest`` gets its own row.
    """
    rows = list[list[int]]()
    with_room: dict[int, list[int]] = {}  # room -> numbers of the rows with that room
    rooms = 0  # bit n is set if a row has room n
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, number = max(longest, length), len(rows)
            rows.append([])
        rows[number].append(index)
        with_room.setdefault(room - length, []).append(number)
        rooms |= 1 << (room - length)
    return rows


def run_encoders(recipe: Recipe, family: ModelFamily) -> tuple[Encoder, ...]:
    """Return all encoders of a run.

    The family's encoders come last, because each encoder records the hash of the file that it read. The hash that
    remains for a sample is therefore the image's, not a companion's.

    Raises:
        TypeError: an entry needs a companion of the image, but its encoder has no ``companion_of``.
    """
    own = family.encoders()
    shared = (mask_encoder(recipe), *control_encoders(recipe, own), inpaint_encoder(recipe, family, own))
    encoders = (*(encoder for encoder in shared if encoder is not None), *own)
    for encoder in encoders:
        if not {IMAGE, CAPTION}.issuperset(encoder.entry.inputs) and not isinstance(encoder, ReadsCompanion):
            raise TypeError(f"{encoder.entry.name} reads {encoder.entry.inputs}, but its encoder has no companion_of")
    return encoders
