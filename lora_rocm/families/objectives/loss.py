"""Reduces a prediction to one loss per sample, in the same way for all families.

Dimensions: B batch. The mean is taken over all other dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_rocm.families.objectives.base import Prediction

if TYPE_CHECKING:
    from lora_rocm.families.base import ComputesLosses, LoadedModel

LOSS_MASK = "loss_mask"
"""Name in the batch of an optional mask of the loss. It has as many dimensions as the distance, [B, ...], and is
broadcastable to it (one channel for all). A position counts with its mask value, and 0 excludes it. The mean is taken
over the masked area.
"""

LOSS_WEIGHTS = "loss_weights"
"""Name in the batch of optional weights, like ``LOSS_MASK``, but the mean is taken over all positions. So a sample
with a small mask has a small loss.
"""


def losses(family: ComputesLosses, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Tensor:
    """Return the loss of each sample of one micro-batch on the device: float32 [B].

    It draws no random numbers, does not synchronise, and copies nothing between host and device.
    """
    return measured(family, model, batch, draws)[0]


def measured(
    family: ComputesLosses, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the result of ``losses`` and the ``Prediction.measures``."""
    prediction = family.predict(model, batch, draws)
    return reduced(prediction, batch.get(LOSS_MASK), batch.get(LOSS_WEIGHTS)), prediction.measures


def reduced(prediction: Prediction, mask: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean distance of each sample: float32 [B].

    With a mask the mean is taken over the masked area. A sample with an empty mask has loss 0.

    Args:
        prediction: the prediction; a weight per sample is applied to the mean.
        mask: see ``LOSS_MASK``.
        weights: see ``LOSS_WEIGHTS``.
    """
    error = prediction.distance(prediction.prediction.float(), prediction.target)
    weight = prediction.weight
    if weight.ndim > 1:
        error = error * weight
    if weights is not None:
        error = error * weights
    others = tuple(range(1, error.ndim))
    if mask is None:
        mean_B = error.mean(dim=others)
    else:
        area = mask.to(error.dtype).expand_as(error)
        total_B = area.sum(dim=others)
        mean_B = (error * area).sum(dim=others) / total_B.clamp(min=torch.finfo(total_B.dtype).tiny)
    return mean_B * weight if weight.ndim == 1 else mean_B
