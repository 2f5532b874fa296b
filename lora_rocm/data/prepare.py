"""From a recipe to items whose every tensor is in the caches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from lora_rocm.data import captions
from lora_rocm.data.buckets import Geometry, Size
from lora_rocm.data.cache import HashMemory, LatentCache
from lora_rocm.data.fill import Caches, Repaired, Report
from lora_rocm.data.plan import Item
from lora_rocm.data.proven import Look, OpenDoor, plain_door
from lora_rocm.data.ready import Entry, Looked, Picture
from lora_rocm.data.samples import Sample, geometries, nothing_left, scan
from lora_rocm.data.seeds import fraction
from lora_rocm.errors import Problem

if TYPE_CHECKING:
    from lora_rocm.families.base import ModelFamily, Tensors
    from lora_rocm.recipe.schema import Recipe

LOST_SHOWN = 60  # letters of a caption's lost end that a notice quotes


@dataclass(frozen=True)
class Facts:
    """What the metadata of the result says of the training pictures.

    tag_frequency: folder -> tag -> in how many captions. bucket_counts: (height, width) -> pictures times repeats.
    folders: folder -> {"n_repeats", "img_count"}, as kohya's ``ss_dataset_dirs``.
    """

    tag_frequency: dict[str, dict[str, int]]
    bucket_counts: dict[Size, int]
    folders: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready.

    items, held_out: to train on, and for the validation loss (neither mirrored, shuffled nor dropped).
    samples: the samples of ``items``, in the same order.
    text_lookup: cached tensors of a preview prompt or of the empty caption.
    repair: encodes the entry (kind, key) again, because of a reason; for ``loader``.
    """

    items: tuple[Item, ...]
    held_out: tuple[Item, ...]
    samples: tuple[Sample, ...]
    set_aside: tuple[Problem, ...]
    notices: tuple[str, ...]
    facts: Facts
    text_lookup: Callable[[str], Tensors]
    repair: Callable[[str, str, str], None]


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

    Raises:
        DataError: the pictures cannot be used, or an encoder made values that are not finite.
        StorageError: the cache cannot be written; what is in it stays.
        MachineError: a picture does not fit into memory, not even in tiles; or what ``look`` raises.
    """
    data, found = recipe.data, scan(recipe.data)
    cuts, too_small = geometries(found.samples, data)
    encoders = {encoder.kind: encoder for encoder in family.encoders()}  # finds the base model: before the long work
    both = (encoders["image"], encoders["text"])
    caches = Caches(cache, *both, device, emit, say, repaired, tiles, tiles_needed, open_door, look)
    fitting = [sample for sample in found.samples if sample.key in cuts]
    pictures = [_picture(sample, cuts[sample.key]) for sample in fitting]
    looked, failed = _filled(caches, pictures, HashMemory(cache.root))
    set_aside = (*found.set_aside, *too_small, *failed.values())
    if not (usable := [sample for sample in fitting if sample.key in looked]):
        raise nothing_left(set_aside)
    hashes = {key: now.sha256 for key, now in looked.items()}
    held_keys = choose_held_out({sample.key: hashes[sample.key] for sample in usable}, data.validation_split)
    training = tuple(sample for sample in usable if sample.key not in held_keys)
    held = [sample for sample in usable if sample.key in held_keys]
    texts = {sample.key: _texts(recipe, sample, sample.key in held_keys) for sample in usable}
    caches.fill_texts([*chain.from_iterable(texts.values()), "", *_prompts(recipe)])
    return Prepared(
        items=tuple(_item(caches, sample, looked[sample.key].entries, texts[sample.key]) for sample in training),
        held_out=tuple(
            _held_out_item(caches, sample, looked[sample.key].entries, texts[sample.key]) for sample in held
        ),
        samples=training,
        set_aside=set_aside,
        notices=found.notices + _say_truncated(family, texts) + _say_held_out(held, usable, data.validation_split),
        facts=_facts(training, cuts),
        text_lookup=caches.text_lookup,
        repair=caches.repair,
    )


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


def _filled(
    caches: Caches, pictures: list[Picture], memory: HashMemory
) -> tuple[dict[str, Looked], dict[str, Problem]]:
    """What is in the cache of each picture, by key, and why others cannot be used; ``pictures`` get their hashes."""
    looked: dict[str, Looked] = {}

    def found(index: int, now: Looked) -> None:
        looked[pictures[index].sample.key] = now
        pictures[index] = replace(pictures[index], sha256=now.sha256)

    failed = caches.fill_images(pictures, memory, found)
    return looked, failed


def _picture(sample: Sample, geometry: Geometry) -> Picture:
    """As it is, and with flip_aug its mirror image."""
    return Picture(sample, geometry, (False, True) if sample.options.flip_aug else (False,))


def _texts(recipe: Recipe, sample: Sample, held_out: bool) -> tuple[str, ...]:
    if held_out:
        return (captions.prepare(sample.caption, sample.options),)
    return captions.variants(sample.caption, sample.options, recipe.data.caption_variants, recipe.train.seed)


def _say_truncated(family: ModelFamily, texts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A notice where captions are longer than the text encoders read; shuffling then decides which tags are lost."""
    lost_of = family.truncated()
    lost = {key: part for key, variants in texts.items() if (part := lost_of(variants[0]))}
    if not lost:
        return ()
    key, part = next(iter(lost.items()))
    many = "1 caption is" if len(lost) == 1 else f"{len(lost)} captions are"
    end = f"{part[:LOST_SHOWN]!r}{'' if len(part) <= LOST_SHOWN else ' ...'}"
    return (f"{many} longer than the text encoders read, for example {key}: lost is {end}.",)


def _say_held_out(held: Sequence[Sample], usable: Sequence[Sample], share: float) -> tuple[str, ...]:
    return (f"{len(held)} of {len(usable)} pictures are held out for the validation loss.",) if share else ()


def _prompts(recipe: Recipe) -> tuple[str, ...]:
    sample = recipe.sample
    return (*sample.prompts, *sample.control_prompts, sample.negative_prompt)


def _item(caches: Caches, sample: Sample, entries: Sequence[Entry], texts: Sequence[str]) -> Item:
    return Item(
        key=sample.key,
        geometry=entries[0].job.geometry,
        image_keys=tuple(entry.key for entry in entries),
        text_keys=tuple(caches.text_key(text) for text in texts),
        dropout_key=caches.text_key(""),
        dropout_rate=sample.options.caption_dropout_rate,
        repeats=sample.repeats,
        picture_keys=tuple(entry.job.key for entry in entries),
    )


def _held_out_item(caches: Caches, sample: Sample, entries: Sequence[Entry], texts: Sequence[str]) -> Item:
    item = _item(caches, sample, entries[:1], texts)
    return replace(item, dropout_rate=0.0, repeats=1)


def _facts(samples: Sequence[Sample], cuts: dict[str, Geometry]) -> Facts:
    tags: dict[str, Counter[str]] = {}
    buckets: Counter[Size] = Counter()
    folders: dict[str, dict[str, int]] = {}
    for sample in samples:
        tags.setdefault(sample.folder, Counter()).update(
            captions.tags_of(captions.prepare(sample.caption, sample.options))
        )
        buckets[cuts[sample.key].target_hw] += sample.repeats
        counts = folders.setdefault(sample.folder, {"n_repeats": sample.repeats, "img_count": 0})
        counts["img_count"] += 1
    tag_frequency = {folder: dict(sorted(counter.items())) for folder, counter in sorted(tags.items())}
    return Facts(tag_frequency, dict(sorted(buckets.items())), dict(sorted(folders.items())))
