"""A run that has made all its updates needs its images no more: what the export says of them is in the checkpoint.

So images that vanish, or change, between the last update and the result do not cost the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_rocm.dataset.shape import Shape
from lora_rocm.latent_cache.manifest import Facts
from lora_rocm.recipe.schema import Recipe
from lora_rocm.train.checkpoint import Checkpoint


@dataclass(frozen=True)
class DataOfCheckpoint:
    """What a checkpoint says of the data. identity: see ``Prepared.identity``."""

    facts: Facts
    steps_per_epoch: int
    max_train_steps: int
    identity: str


def data_of_checkpoint(checkpoint: Checkpoint | None, recipe: Recipe, num_ranks: int) -> DataOfCheckpoint | None:
    """The data of a run whose training is complete; None while there are updates to make, or nothing is said of it."""
    if checkpoint is None:
        return None
    train = recipe.train
    effective = train.batch_size * train.gradient_accumulation_steps * num_ranks
    try:  # somebody else may have written it
        said, identity = checkpoint.facts["metadata"], checkpoint.facts["data"]
        counts = {Shape.parse(name): int(count) for name, count in said["buckets"].items()}
        facts = Facts(dict(said["tag_frequency"]), counts, dict(said["dataset_dirs"]))
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    steps_per_epoch = sum(-(-count // effective) for count in counts.values())
    max_train_steps = train.max_train_steps or steps_per_epoch * (train.epochs or 1)
    if not isinstance(identity, str) or steps_per_epoch <= 0 or checkpoint.position.updates < max_train_steps:
        return None
    return DataOfCheckpoint(facts, steps_per_epoch, max_train_steps, identity)
