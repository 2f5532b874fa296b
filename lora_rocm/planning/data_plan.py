"""Steps, buckets and cache entries of training on given samples, by arithmetic alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.dataset.order.update_note import larger_updates_note
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.errors import Problem
from lora_rocm.recipe.schema import Recipe

if TYPE_CHECKING:
    from lora_rocm.dataset.sample_table import Sample


@dataclass
class Seen:
    """Facts about the texts as the model gets them, collected while they are read. Only the first texts are inspected.

    Attributes:
        shown: the first samples, with marks around the parts that are trained on.
        warnings: warnings about the inspected texts.
        notices: notices about the inspected texts.
        looked_at: number of inspected texts.
        refused: number of inspected texts that cannot be trained on, by index of their source.
        problems: problems of the first such texts.
        lengths: number of inspected samples or packed rows per epoch, by tokens. None if only a run can count them.
        held_out: number of inspected samples that are held out.
        cached: number of inspected texts and prompts in the cache, and their total number. None if not counted.
    """

    shown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    looked_at: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lengths: dict[int, int] | None = None
    held_out: int = 0
    cached: tuple[int, int] | None = None


@dataclass(frozen=True)
class DataPlan:
    """Size of the training data.

    Attributes:
        buckets: samples per epoch by shape; empty if only a run can count them.
        steps_per_epoch: updates per epoch.
        max_train_steps: total number of updates.
        num_images: number of images in the cache, with each version of an image counted.
        num_captions: number of captions or texts in the cache.
        how_sure: word before the numbers: "about ", "at most ", or empty if they are exact.
        held_out: number of samples for the validation loss, or null if unknown.
        num_samples: samples per epoch.
        one_bucket_steps: updates per epoch if all micro-batches of an update came from one bucket, as in earlier
            versions.
        cached: number of texts found in the cache, and number of texts searched there. Null if the cache was not
            searched.
    """

    buckets: dict[SampleShape, int]
    steps_per_epoch: int
    max_train_steps: int
    num_images: int
    num_captions: int
    how_sure: str = ""
    held_out: int | None = None
    num_samples: int = 0
    one_bucket_steps: int = 0
    cached: tuple[int, int] | None = None


@dataclass(frozen=True)
class RunPlan:
    """The use of the data by a run.

    Attributes:
        data: size of the data.
        batch_size: samples per micro-batch.
        gradient_accumulation_steps: micro-batches per update.
        epochs: number of epochs, from the recipe or computed from its steps.
        steps_are_given: whether the recipe sets the number of steps, not of epochs.
        fewer_because: possible reasons why an update has fewer samples than the recipe's batch size.
        note: sentence about a number of updates that differs from earlier versions, or null if it is the same.
        packing: whether a row of a batch contains several texts.
        validation_split: share of the samples that is held out for the validation loss.
        cache_dir: folder of the caches.
        output_dir: folder in which the run directory is created.
    """

    data: DataPlan
    batch_size: int
    gradient_accumulation_steps: int
    epochs: float
    steps_are_given: bool
    fewer_because: str
    note: str | None
    packing: bool
    validation_split: float
    cache_dir: Path
    output_dir: Path


def run_plan(recipe: Recipe, data: DataPlan) -> RunPlan:
    """Return how a run of this recipe would use data of this size."""
    train = recipe.train
    why = ["the last batch of a bucket is not full"]
    if train.gradient_accumulation_steps > 1:
        why.append("the last update of an epoch has fewer batches")
    if any(source.max_batch_size for source in recipe.data.resolved_sources()):
        why.append("max_batch_size of a source is smaller")
    return RunPlan(
        data,
        train.batch_size,
        train.gradient_accumulation_steps,
        train.epochs or data.max_train_steps / data.steps_per_epoch,
        bool(train.max_train_steps),
        " and ".join(why),
        larger_updates_note(train, data.steps_per_epoch, data.one_bucket_steps, data.how_sure),
        recipe.data.packing,
        recipe.data.validation_split,
        Path(recipe.cache.dir),
        Path(recipe.output.dir),
    )


def plan_data(recipe: Recipe, samples: Sequence[Sample], shapes: Mapping[str, SampleShape]) -> DataPlan:
    """Return the plan for image or video samples.

    Args:
        recipe: the recipe.
        samples: the samples.
        shapes: shape of each sample, by key.
    """
    from lora_rocm.dataset.captions.captions import variants
    from lora_rocm.dataset.images.views import views_of

    buckets: Counter[SampleShape] = Counter()
    of_size: dict[int, Counter[SampleShape]] = {}  # batch size -> buckets of the sources with this batch size
    sizes = [source.max_batch_size or recipe.train.batch_size for source in recipe.data.resolved_sources()]
    captions: set[str] = {"", recipe.sample.negative_prompt, *recipe.sample.texts}
    for sample in samples:
        buckets[shapes[sample.key]] += sample.repeats
        of_size.setdefault(sizes[sample.source], Counter())[shapes[sample.key]] += sample.repeats
        captions.update(variants(sample.captions, sample.options, recipe.data.caption_variants, recipe.train.seed))
    num_images = sum(len(views_of(sample.options)) for sample in samples)
    plan = _plan(recipe, {size: counts.values() for size, counts in of_size.items()}, len(captions))
    return replace(plan, buckets=dict(buckets), num_images=num_images)


def plan_texts(recipe: Recipe, of_source: Counter[int], reported: Seen) -> DataPlan:
    """Return the plan for texts.

    Args:
        recipe: the recipe.
        of_source: number of texts by index of their source.
        reported: facts that the child process has collected about the first texts.
    """
    num_texts = of_source.total() - sum(reported.refused.values())
    num_captions = num_texts + len({"", recipe.sample.negative_prompt, *recipe.sample.texts})
    if reported.lengths is None:  # in the worst case no two texts have the same length
        sources = recipe.data.resolved_sources()
        alone = chain.from_iterable(repeat(sources[index].repeats, number) for index, number in of_source.items())
        return replace(_plan(recipe, {recipe.train.batch_size: alone}, num_captions), how_sure="at most ")
    scale = of_source.total() / reported.looked_at
    (axis,) = recipe.spec.axes
    buckets = {SampleShape.of(**{axis.name: length}): round(n * scale) for length, n in reported.lengths.items()}
    how_sure, held_out = "about " if scale > 1 else "", round(reported.held_out * scale)
    plan = _plan(recipe, {recipe.train.batch_size: buckets.values()}, num_captions)
    return replace(plan, buckets=buckets, how_sure=how_sure, held_out=held_out, cached=reported.cached)


def _plan(recipe: Recipe, counts: Mapping[int, Iterable[int]], num_captions: int) -> DataPlan:
    """Return a plan without shapes.

    Args:
        recipe: the recipe.
        counts: for each batch size, the number of samples per epoch in each of its buckets.
        num_captions: number of captions or texts.
    """
    from lora_rocm.dataset.order.batch_plan import num_batches, num_updates

    accumulation, of_size = (
        recipe.train.gradient_accumulation_steps,
        {size: list(each) for size, each in counts.items()},
    )
    micro_batches = sum(num_batches(each, size) for size, each in of_size.items())
    steps_per_epoch = num_updates(micro_batches, accumulation)
    return DataPlan(
        {},
        steps_per_epoch,
        recipe.train.num_steps(steps_per_epoch),
        0,
        num_captions,
        num_samples=sum(map(sum, of_size.values())),
        one_bucket_steps=sum(num_batches(each, size * accumulation) for size, each in of_size.items()),
    )
