"""A note that updates have more samples than in earlier versions. ``check`` and ``train`` print it."""

from __future__ import annotations

import math

from lora_rocm.recipe.schema import TrainSection


def larger_updates_note(
    train: TrainSection, steps_per_epoch: int, one_bucket_steps: int, how_sure: str = ""
) -> str | None:
    """Return a note with advice if earlier versions made more updates per epoch; None otherwise.

    Args:
        train: the section ``train`` of the recipe.
        steps_per_epoch: updates per epoch.
        one_bucket_steps: updates per epoch in earlier versions, where each update used one bucket.
        how_sure: word before the number of updates if it is uncertain ("about " or "at most "), else empty.
    """
    if one_bucket_steps <= steps_per_epoch:
        return None
    text = (
        "an update takes micro-batches from any bucket. Versions before 2026-11-27 padded updates from one bucket. So "
        f"they made {how_sure}{one_bucket_steps} updates per epoch of this recipe instead of {steps_per_epoch}. "
    )
    if train.max_train_steps:
        return (
            text + "The same number of steps now trains on more samples in the same time, so fewer steps may be enough."
        )
    epochs = math.ceil((train.epochs or 1) * one_bucket_steps / steps_per_epoch)
    return text + (
        f"The number of epochs is the same, but updates are fewer and larger. If that trains too little, raise "
        f"optim.learning_rate, or set train.epochs: {epochs} to get as many updates as before."
    )
