"""Lets a completely trained run be exported without its images: the checkpoint has the facts that the export needs.

So images that are deleted or changed between the last update and the export do not prevent the export.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_rocm.dataset.order.batch_plan import num_batches, num_updates
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.encoded_cache.manifest import SampleStatistics
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class DataOfCheckpoint:
    """Facts about the data, as stored in a checkpoint. identity: see ``Prepared.identity``."""

    facts: SampleStatistics
    steps_per_epoch: int
    max_train_steps: int
    identity: str


def data_of_checkpoint(checkpoint: Checkpoint | None, recipe: Recipe, num_ranks: int) -> DataOfCheckpoint | None:
    """Facts about the data of a completely trained run; None if updates remain or the checkpoint lacks these facts."""
    if checkpoint is None or any(source.max_batch_size for source in recipe.data.sources):  # its facts name no sources
        return None
    train = recipe.train
    per_update = train.gradient_accumulation_steps * num_ranks
    try:  # the checkpoint may come from somebody else
        said, identity = checkpoint.facts["metadata"], checkpoint.facts["data"]
        counts = {SampleShape.parse(name): int(count) for name, count in said["buckets"].items()}
        facts = SampleStatistics(dict(said["tag_frequency"]), counts, dict(said["dataset_dirs"]))
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    if checkpoint.one_bucket_updates:
        steps_per_epoch = num_batches(counts.values(), train.batch_size * per_update)
    else:
        steps_per_epoch = num_updates(num_batches(counts.values(), train.batch_size), per_update)
    max_train_steps = train.num_steps(steps_per_epoch)
    if not isinstance(identity, str) or steps_per_epoch <= 0 or checkpoint.position.updates < max_train_steps:
        return None
    return DataOfCheckpoint(facts, steps_per_epoch, max_train_steps, identity)
