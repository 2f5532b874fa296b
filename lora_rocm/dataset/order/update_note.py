"""A note of ``check`` and of a run about updates with more samples than in earlier versions."""

from __future__ import annotations

import math

from lora_rocm.recipe.schema import TrainSection


def larger_updates_note(
    train: TrainSection, steps_per_epoch: int, one_bucket_steps: int, how_sure: str = ""
) -> str | None:
    """The note if earlier versions made more updates per epoch, with advice; None if not.

    Args:
        train: the section ``train`` of the recipe.
        steps_per_epoch: updates per epoch.
        one_bucket_steps: the same if all micro-batches of an update came from one bucket, as in earlier versions.
        how_sure: empty, or "about " or "at most " for both numbers.
    """
    if one_bucket_steps <= steps_per_epoch:
        return None
    text = (
        "an update takes micro-batches of any bucket. Versions before 2026-11-27 filled up updates of one bucket, and "
        f"made {how_sure}{one_bucket_steps} updates per epoch of this recipe instead of {steps_per_epoch}. "
    )
    if train.max_train_steps:
        return text + "The same steps now train on more samples, in the same time: fewer may be enough."
    epochs = math.ceil((train.epochs or 1) * one_bucket_steps / steps_per_epoch)
    return text + (
        f"The epochs are the same, the updates are fewer and larger. If that trains too little, raise "
        f"optim.learning_rate, or set train.epochs: {epochs} for as many updates as before."
    )
