"""From a recipe to items whose every tensor is in the caches."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from lora_rocm.cache_files.hash_memory import HashMemory
from lora_rocm.dataset import captions
from lora_rocm.dataset.batch_sampler import Item
from lora_rocm.dataset.buckets import Geometry
from lora_rocm.dataset.caption_length import TokenLimit, cut_notice
from lora_rocm.dataset.columns import Keys, Lazy
from lora_rocm.dataset.progress import QUIET_S, Progress, Report
from lora_rocm.dataset.scan import Cropped, Sample, Samples, geometry_of, groups_of, nothing_left, say_copies
from lora_rocm.dataset.shape import Shape
from lora_rocm.dataset.text_scan import find_samples
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.seeds import fraction
from lora_rocm.latent_cache.encode import Caches
from lora_rocm.latent_cache.encode_session import Encoding
from lora_rocm.latent_cache.image_preprocess import Looked, Wanted
from lora_rocm.latent_cache.item_table import Items, SamplesOf, Usable, identity
from lora_rocm.latent_cache.manifest import Facts, Manifest, Shelf

if TYPE_CHECKING:
    from lora_rocm.families.base import ModelFamily, Tensors
    from lora_rocm.recipe.schema import DataSection, Recipe

MAX_TAGS = 20_000  # of a folder that the metadata counts: the most frequent, where there are twice as many


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready.

    items, held_out: to train on, and for the validation loss (neither mirrored, shuffled nor dropped).
    samples: the samples of ``items``, in the same order.
    text_lookup: cached tensors of a preview prompt or of the empty caption.
    repair: encodes the entry (kind, key) again, because of a reason; for ``loader``.
    """

    items: Sequence[Item]
    held_out: Sequence[Item]
    samples: Sequence[Sample]
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    facts: Facts
    text_lookup: Callable[[str], Tensors]
    repair: Callable[[str, str, str], None]

    def identity(self) -> str:
        """Changes when a resumed run would see other samples in another order."""
        return self._identity

    @cached_property
    def _identity(self) -> str:  # of a million items it takes seconds, and a start asks for it several times
        return identity(self.items)


def prepare(recipe: Recipe, family: ModelFamily, encoding: Encoding, facts: Facts | None = None) -> Prepared:
    """Find the samples, cut their images, hold some out, and fill the caches.

    Args:
        recipe: what to train on.
        family: whose encoders fill the caches.
        encoding: where they run, where their entries are kept, and who hears of it.
        facts: of a run that needs its samples no more: none is looked for, and there are no items.

    Raises:
        DataError: the images cannot be used, or an encoder made values that are not finite.
        StorageError: the cache cannot be written; what is in it stays.
        MachineError: an image does not fit into memory, not even in tiles; or what ``Encoding.look`` raises.
    """
    encoders = family.encoders()  # finds the base model: before the long work
    caches = Caches(encoding, encoders)
    if facts is not None:
        caches.fill_texts(("", *_prompts(recipe)))
        return Prepared((), (), (), (), (), facts, caches.text_lookup, caches.repair)
    shelf = Shelf(encoding.cache.root, recipe, encoders)
    kept = shelf.recall()
    if kept is None:
        listing = shelf.listing()
        kept = _manifest(recipe, family, caches)
        shelf.keep(kept, listing)
    else:
        caches.fill_texts(("", *_prompts(recipe)))
    texts = _Texts(recipe, kept.usable, kept.training, kept.held_out, encoding.report)
    caches.belong(kept.usable if caches.of_images() else (), texts, texts.pairs() if caches.of_pairs() else ())
    return _prepared(kept, caches)


def _prepared(kept: Manifest, caches: Caches) -> Prepared:
    entries = [encoder.entry for encoder in caches.encoders]
    return Prepared(
        items=Items(kept.usable, kept.training, kept.captions, entries),
        held_out=Items(kept.usable, kept.held_out, kept.held_out_captions, entries, held_out=True),
        samples=SamplesOf(kept.usable, kept.training),
        set_aside=kept.set_aside,
        notices=kept.notices,
        facts=kept.facts,
        text_lookup=caches.text_lookup,
        repair=caches.repair,
    )


def _manifest(recipe: Recipe, family: ModelFamily, caches: Caches) -> Manifest:
    """Everything found, cut, encoded and counted."""
    data, limits = recipe.data, family.token_limits()  # reads the tokenizers: before the long work
    report = caches.encoding.report
    found = find_samples(recipe, report, copies=False)  # it would have to read them; here they are hashed
    usable, too_small, cropped = _cut(found.samples, data, caches)
    memory = HashMemory(caches.encoding.cache.root)
    failed = caches.fill_images(usable, memory, usable.found) if caches.of_images() else {}
    set_aside = (*found.set_aside, *too_small, *failed.values())
    if not (ready := usable.ready):
        raise nothing_left(set_aside)
    held = _held_out(usable, ready, data.validation_split)
    training = array("q", (place for place in ready if place not in held))
    texts = _Texts(recipe, usable, training, array("q", sorted(held)), report)
    caches.fill_texts(texts)
    _count_tokens(caches, texts)
    pairs = _Pairs(caches, texts, memory)
    return Manifest(
        usable,
        texts.training,
        texts.held_out,
        _caption_keys(caches, texts, pairs, held_out=False),
        _caption_keys(caches, texts, pairs, held_out=True),
        set_aside,
        (
            *found.notices,
            *cropped,
            *_say_copies(usable, ready),
            *_say_cut(limits, texts),
            *_say_held_out(texts),
        ),
        _facts(recipe, usable, training),
        lasting=found.lasting and caches.all_could_be_read,
    )


def _count_tokens(caches: Caches, texts: _Texts) -> None:
    """The shape of each text, which only its encoder knows: how it counts, begins, ends and cuts a text is its own."""
    for encoder in caches.of_captions():
        entry = encoder.entry
        if not entry.follows_shape:
            continue
        tensor, axis = next((name, spec.dims.index("S")) for name, spec in entry.tensors.items() if "S" in spec.dims)
        for held_out, places in ((False, texts.training), (True, texts.held_out)):
            for place, (text, *_) in zip(places, texts.of(held_out), strict=True):
                texts.usable.counted(place, caches.text_lookup(text)[tensor].shape[axis])


class _Pairs:
    """The keys of the entries that are made from images and captions together, once these entries are filled.

    Raises:
        DataError: an image that could be read before cannot be read now.
    """

    def __init__(self, caches: Caches, texts: _Texts, memory: HashMemory) -> None:
        self._keys: dict[tuple[str, int], list[str]] = {}
        encoders = caches.of_pairs()
        for held_out in (False, True) if encoders else ():
            found = partial(self._found, texts.usable, texts.held_out if held_out else texts.training)
            failed = caches.fill_images(_WantedPairs(texts, held_out), memory, found, encoders)
            for problem in failed.values():
                raise DataError("image-unreadable", problem.what, where=problem.where, fix=problem.fix)

    def _found(self, usable: Usable, places: Sequence[int], index: int, entry: str, looked: Looked) -> None:
        usable.hashed(places[index], looked.sha256)
        self._keys[entry, places[index]] = [made.key for made in looked.entries]

    def of(self, entry: str, place: int) -> list[str]:
        """The keys of one sample."""
        return self._keys[entry, place]


def _caption_keys(caches: Caches, texts: _Texts, pairs: _Pairs, held_out: bool) -> dict[str, Keys]:
    """For each entry that is made from captions its keys, as ``Items`` wants them."""
    keys = {}
    for encoder in caches.encoders:
        if not encoder.entry.has_captions:
            continue
        column = keys[encoder.entry.name] = Keys()
        if encoder.entry.has_views:
            for place in texts.held_out if held_out else texts.training:
                column.append(pairs.of(encoder.entry.name, place))
            continue
        for captioned in texts.of(held_out):
            column.append(caches.caption_key(encoder, text) for text in (*captioned, ""))
    return keys


def _cut(samples: Samples, data: DataSection, caches: Caches) -> tuple[Usable, list[Problem], list[str]]:
    """The samples whose images can be cut, those that are too small, and notices about the first."""
    usable = Usable(samples, (encoder.entry.name for encoder in caches.of_images()))
    if not any(encoder.entry.has_views for encoder in caches.encoders):  # no image is read
        for index in range(len(samples)):
            usable.append(index, None)
        return usable, [], []
    too_small, cropped = list[Problem](), Cropped(data)
    for index, sample in enumerate(samples):
        geometry = geometry_of(sample, data)
        if isinstance(geometry, Geometry):
            usable.append(index, geometry)
            cropped.add(sample, geometry)
        else:
            too_small.append(geometry)
    return usable, too_small, cropped.notices()


@dataclass(frozen=True)
class _Texts:
    """The captions of each sample that is used; made anew each time, for there may be very many."""

    recipe: Recipe
    usable: Usable
    training: array[int]
    held_out: array[int]
    report: Report

    def __iter__(self) -> Iterator[str]:
        """All of the run, with those of previews and the one without words."""
        used = chain.from_iterable(chain(self.of(False), self.of(True)))
        return chain(used, ("", *_prompts(self.recipe)))

    def of(self, held_out: bool) -> Iterator[tuple[str, ...]]:
        """The captions of each training or held-out sample; the first is the caption itself."""
        places = self.held_out if held_out else self.training
        progress = Progress("texts", len(places), self.report, quiet_s=QUIET_S)
        for place in places:
            yield self.at(place, held_out)
            progress.step()

    def at(self, place: int, held_out: bool) -> tuple[str, ...]:
        """The captions of one sample."""
        return _texts(self.recipe, self.usable.sample(place), held_out)

    def pairs(self) -> Iterable[Wanted]:
        """All samples with their captions."""
        return _All((_WantedPairs(self, False), _WantedPairs(self, True)))


@dataclass(frozen=True)
class _All:
    """Several sequences, one after the other."""

    parts: Sequence[Iterable[Wanted]]

    def __iter__(self) -> Iterator[Wanted]:
        return chain.from_iterable(self.parts)


class _WantedPairs(Lazy[Wanted]):
    """Training or held-out samples, with their captions and the empty one."""

    def __init__(self, texts: _Texts, held_out: bool) -> None:
        self._texts, self._held_out = texts, held_out
        self._places = texts.held_out if held_out else texts.training

    def __len__(self) -> int:
        return len(self._places)

    def _made(self, index: int) -> Wanted:
        place = self._places[index]
        wanted, captions = self._texts.usable[place], (*self._texts.at(place, self._held_out), "")
        return replace(wanted, captions=captions, flips=wanted.flips[:1] if self._held_out else wanted.flips)


def _held_out(usable: Usable, ready: Sequence[int], share: float) -> set[int]:
    if share == 0.0:
        return set()
    places = {usable.sample_key(place): place for place in ready}
    held = choose_held_out({key: _content_hash(usable, place) for key, place in places.items()}, share)
    return {places[key] for key in held}


def _content_hash(usable: Usable, place: int) -> str:
    """Of the image; of the caption if no image is read."""
    sha256 = usable.sha256(place)
    return sha256.hex() if any(sha256) else hashlib.sha256(usable.sample(place).caption.encode()).hexdigest()


def _say_copies(usable: Usable, ready: Sequence[int]) -> list[str]:
    """A notice if images have the same content."""
    short_N = np.array([int.from_bytes(usable.sha256(place)[:8], "little") for place in ready], dtype=np.uint64)
    if not short_N.any():  # no image is read
        return []
    order_N = np.argsort(short_N, kind="stable")
    same_N = np.flatnonzero(short_N[order_N][1:] == short_N[order_N][:-1])
    alike = sorted({int(order_N[at + step]) for at in same_N for step in (0, 1)})
    groups = groups_of(usable.sha256(ready[place]) for place in alike)
    return say_copies(usable.sample, [[alike[number] for number in group] for group in groups], ready)


def choose_held_out(hashes: dict[str, str], share: float) -> set[str]:
    """Keys of the samples to hold out: those whose content hashes below ``share``.

    Only the content decides, so adding or renaming samples moves none from one part to the other, and copies stay
    together. If a part would be empty, one sample is moved over.
    """
    if share == 0.0:
        return set()
    places = {key: fraction("held out", sha256) for key, sha256 in hashes.items()}
    cut = min(max(share, min(places.values()) + 1e-12), max(places.values()))
    return {key for key, place in places.items() if place < cut}


def _texts(recipe: Recipe, sample: Sample, held_out: bool) -> tuple[str, ...]:
    if held_out:
        return (captions.prepare(sample.caption, sample.options),)
    return captions.variants(sample.caption, sample.options, recipe.data.caption_variants, recipe.train.seed)


def _say_cut(limits: Sequence[TokenLimit], texts: _Texts) -> tuple[str, ...]:
    """A notice where captions are longer than the text encoders read; shuffling then decides which tags are lost."""
    captioned = (
        (texts.usable.sample_key(place), caption)
        for places, held_out in ((texts.training, False), (texts.held_out, True))
        for place, (caption, *_) in zip(places, texts.of(held_out), strict=True)
    )
    return cut_notice(captioned, limits, texts.recipe.spec.trains_on_texts)


def _say_held_out(texts: _Texts) -> tuple[str, ...]:
    held, ready = len(texts.held_out), len(texts.training) + len(texts.held_out)
    share = texts.recipe.data.validation_split
    return (f"{held} of {ready} samples are held out for the validation loss.",) if share else ()


def _prompts(recipe: Recipe) -> tuple[str, ...]:
    sample = recipe.sample
    return (*sample.prompts, *sample.control_prompts, sample.negative_prompt)


def _facts(recipe: Recipe, usable: Usable, training: Sequence[int]) -> Facts:
    tags: dict[str, Counter[str]] = {}
    shapes: Counter[Shape] = Counter()
    folders: dict[str, dict[str, int]] = {}
    for place in training:
        sample = usable.sample(place)
        counted = tags.setdefault(sample.folder, Counter())
        if not recipe.spec.trains_on_texts:  # a text has no tags, and a LoRA file is given away
            counted.update(captions.tags_of(captions.prepare(sample.caption, sample.options)))
        if len(counted) > 2 * MAX_TAGS:
            tags[sample.folder] = Counter(dict(counted.most_common(MAX_TAGS)))
        shapes[usable.shape(place)] += sample.repeats
        folder = folders.setdefault(sample.folder, {"n_repeats": sample.repeats, "img_count": 0})
        folder["img_count"] += 1
    tag_frequency = {folder: dict(sorted(counter.items())) for folder, counter in sorted(tags.items())}
    return Facts(
        tag_frequency, dict(sorted(shapes.items(), key=lambda pair: pair[0].axes)), dict(sorted(folders.items()))
    )
