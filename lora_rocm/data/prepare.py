"""From a recipe to items whose every tensor is in the caches."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_rocm.data import captions
from lora_rocm.data.buckets import Geometry
from lora_rocm.data.cache import HashMemory, LatentCache
from lora_rocm.data.caption_length import TokenLimit, cut_notice
from lora_rocm.data.columns import Keys
from lora_rocm.data.fill import Caches, Repaired
from lora_rocm.data.items import Items, Pictures, SamplesOf, identity
from lora_rocm.data.manifest import Facts, Manifest, Shelf
from lora_rocm.data.plan import Item
from lora_rocm.data.progress import QUIET_S, Progress, Report
from lora_rocm.data.proven import Look, OpenDoor, plain_door
from lora_rocm.data.samples import Cropped, Sample, Samples, geometry_of, groups_of, nothing_left, say_copies, scan
from lora_rocm.data.seeds import fraction
from lora_rocm.data.shape import Shape
from lora_rocm.errors import Problem

if TYPE_CHECKING:
    from lora_rocm.families.base import Encoder, ModelFamily, Tensors
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


def prepare(
    recipe: Recipe,
    family: ModelFamily,
    cache: LatentCache,
    device: torch.device,
    emit: Report,
    say: Callable[[str], None] = lambda text: None,
    repaired: Repaired = lambda *facts: None,
    tiles: bool = False,
    tiles_needed: Callable[[], None] = lambda: None,
    open_door: OpenDoor = plain_door,
    look: Look | None = None,
    facts: Facts | None = None,
) -> Prepared:
    """Find the pictures, cut them, hold some out, and fill the caches.

    Args:
        recipe: what to train on.
        family: whose encoders fill the caches.
        cache: where encoded pictures and captions are kept.
        device: where the encoders run.
        emit: gets the progress.
        say: gets sentences about the encoders: kernels are being built, a slow way was left.
        repaired: gets every damaged entry that was encoded again, now or while the batches are read.
        tiles: see ``Caches``.
        tiles_needed: see ``Caches``.
        open_door: see ``Caches``.
        look: see ``Caches``.
        facts: of a run that needs its pictures no more: none is looked for, and there are no items.

    Raises:
        DataError: the pictures cannot be used, or an encoder made values that are not finite.
        StorageError: the cache cannot be written; what is in it stays.
        MachineError: a picture does not fit into memory, not even in tiles; or what ``look`` raises.
    """
    both = _image_and_text(family)  # finds the base model: before the long work
    caches = Caches(cache, *both, device, emit, say, repaired, tiles, tiles_needed, open_door, look)
    if facts is not None:
        caches.fill_texts(("", *_prompts(recipe)))
        return Prepared((), (), (), (), (), facts, caches.text_lookup, caches.repair)
    shelf = Shelf(cache.root, recipe, [encoder.fingerprint for encoder in both])
    kept = shelf.recall()
    if kept is None:
        listing = shelf.listing()
        kept = _manifest(recipe, family, caches)
        shelf.keep(kept, listing)
    else:
        caches.fill_texts(("", *_prompts(recipe)))
    caches.belong(kept.pictures, _Texts(recipe, kept.pictures, kept.training, kept.held_out, emit))
    return _prepared(kept, caches)


def _prepared(kept: Manifest, caches: Caches) -> Prepared:
    dropout_key = caches.text_key("")
    return Prepared(
        items=Items(kept.pictures, kept.training, kept.texts, dropout_key),
        held_out=Items(kept.pictures, kept.held_out, kept.held_out_texts, dropout_key, held_out=True),
        samples=SamplesOf(kept.pictures, kept.training),
        set_aside=kept.set_aside,
        notices=kept.notices,
        facts=kept.facts,
        text_lookup=caches.text_lookup,
        repair=caches.repair,
    )


def _image_and_text(family: ModelFamily) -> tuple[Encoder, Encoder]:
    encoders = {encoder.kind: encoder for encoder in family.encoders()}
    return encoders["image"], encoders["text"]


def _manifest(recipe: Recipe, family: ModelFamily, caches: Caches) -> Manifest:
    """Everything found, cut, encoded and counted."""
    data, limits = recipe.data, family.token_limits()  # reads the tokenizers: before the long work
    found = scan(data, caches.report, copies=False)  # it would have to read them; here they are hashed
    pictures, too_small, cropped = _cut(found.samples, data)
    failed = caches.fill_images(pictures, HashMemory(caches.cache.root), pictures.found)
    set_aside = (*found.set_aside, *too_small, *failed.values())
    if not (usable := pictures.ready):
        raise nothing_left(set_aside)
    held = _held_out(pictures, usable, data.validation_split)
    training = array("q", (place for place in usable if place not in held))
    texts = _Texts(recipe, pictures, training, array("q", sorted(held)), caches.report)
    caches.fill_texts(texts)
    return Manifest(
        pictures,
        texts.training,
        texts.held_out,
        texts.keys(caches.text_key, held_out=False),
        texts.keys(caches.text_key, held_out=True),
        set_aside,
        (
            *found.notices,
            *cropped,
            *_say_copies(pictures, usable),
            *_say_cut(limits, texts),
            *_say_held_out(texts),
        ),
        _facts(pictures, training),
        lasting=found.lasting and caches.all_could_be_read,
    )


def _cut(samples: Samples, data: DataSection) -> tuple[Pictures, list[Problem], list[str]]:
    """The pictures that can be cut, those that are too small, and notices about the first."""
    pictures, too_small, cropped = Pictures(samples), list[Problem](), Cropped(data)
    for index, sample in enumerate(samples):
        geometry = geometry_of(sample, data)
        if isinstance(geometry, Geometry):
            pictures.append(index, geometry)
            cropped.add(sample, geometry)
        else:
            too_small.append(geometry)
    return pictures, too_small, cropped.notices()


@dataclass(frozen=True)
class _Texts:
    """The captions of each picture that is used; made anew each time, for there may be very many."""

    recipe: Recipe
    pictures: Pictures
    training: array[int]
    held_out: array[int]
    report: Report

    def __iter__(self) -> Iterator[str]:
        """All of the run, with those of previews and the one without words."""
        used = chain.from_iterable(chain(self.of(self.training, False), self.of(self.held_out, True)))
        return chain(used, ("", *_prompts(self.recipe)))

    def of(self, places: Sequence[int], held_out: bool) -> Iterator[tuple[str, ...]]:
        """Those of each; the first is the caption itself."""
        progress = Progress("texts", len(places), self.report, quiet_s=QUIET_S)
        for place in places:
            yield _texts(self.recipe, self.pictures.sample(place), held_out)
            progress.step()

    def keys(self, key_of: Callable[[str], str], held_out: bool) -> Keys:
        """Their cache keys."""
        keys = Keys()
        for texts in self.of(self.held_out if held_out else self.training, held_out):
            keys.append(map(key_of, texts))
        return keys


def _held_out(pictures: Pictures, usable: Sequence[int], share: float) -> set[int]:
    if share == 0.0:
        return set()
    places = {pictures.sample_key(place): place for place in usable}
    held = choose_held_out({key: pictures.sha256(place).hex() for key, place in places.items()}, share)
    return {places[key] for key in held}


def _say_copies(pictures: Pictures, usable: Sequence[int]) -> list[str]:
    """A notice where pictures have the same content."""
    short_N = np.array([int.from_bytes(pictures.sha256(place)[:8], "little") for place in usable], dtype=np.uint64)
    order_N = np.argsort(short_N, kind="stable")
    same_N = np.flatnonzero(short_N[order_N][1:] == short_N[order_N][:-1])
    alike = sorted({int(order_N[at + step]) for at in same_N for step in (0, 1)})
    groups = groups_of(pictures.sha256(usable[place]) for place in alike)
    return say_copies(pictures.sample, [[alike[number] for number in group] for group in groups], usable)


def choose_held_out(hashes: dict[str, str], share: float) -> set[str]:
    """Keys of the samples to hold out: those whose content hashes below ``share``.

    It looks at nothing but a picture's content, so adding or renaming pictures moves none from one part to the other,
    and copies stay together. Only where this would leave a part empty is one picture moved over.
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
        (texts.pictures.sample_key(place), caption)
        for places, held_out in ((texts.training, False), (texts.held_out, True))
        for place, (caption, *_) in zip(places, texts.of(places, held_out), strict=True)
    )
    return cut_notice(captioned, limits)


def _say_held_out(texts: _Texts) -> tuple[str, ...]:
    held, usable = len(texts.held_out), len(texts.training) + len(texts.held_out)
    share = texts.recipe.data.validation_split
    return (f"{held} of {usable} pictures are held out for the validation loss.",) if share else ()


def _prompts(recipe: Recipe) -> tuple[str, ...]:
    sample = recipe.sample
    return (*sample.prompts, *sample.control_prompts, sample.negative_prompt)


def _facts(pictures: Pictures, training: Sequence[int]) -> Facts:
    tags: dict[str, Counter[str]] = {}
    shapes: Counter[Shape] = Counter()
    folders: dict[str, dict[str, int]] = {}
    for place in training:
        sample = pictures.sample(place)
        counted = tags.setdefault(sample.folder, Counter())
        counted.update(captions.tags_of(captions.prepare(sample.caption, sample.options)))
        if len(counted) > 2 * MAX_TAGS:
            tags[sample.folder] = Counter(dict(counted.most_common(MAX_TAGS)))
        shapes[pictures.shape(place)] += sample.repeats
        folder = folders.setdefault(sample.folder, {"n_repeats": sample.repeats, "img_count": 0})
        folder["img_count"] += 1
    tag_frequency = {folder: dict(sorted(counter.items())) for folder, counter in sorted(tags.items())}
    return Facts(
        tag_frequency, dict(sorted(shapes.items(), key=lambda pair: pair[0].axes)), dict(sorted(folders.items()))
    )
