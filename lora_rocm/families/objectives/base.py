"""What an objective is: it draws what a training step needs besides data, and says what the model should predict.

An objective knows no model. The family says which cached tensors it is about and how they are normalised, calls the
model in ``predict``, and never reduces a loss: that is ``reduction``'s, the same for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Draws:
    """All randomness of one micro-batch, and what is looked up for it on the host: a function of the seeds alone.

    CPU tensors with the batch first. Timesteps may be whole or floats, one a sample or one a token.
    """

    tensors: dict[str, Tensor]


Distance = Callable[[Tensor, Tensor], Tensor]
"""(prediction in float32, target) -> the distance at each place, in float32."""


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """The squared error at each place."""
    return (prediction - target).square()


@dataclass(frozen=True)
class Prediction:
    """What a model made of a micro-batch, and what it should have made.

    prediction: [B, ...], in the model's number format.
    target: what ``distance`` compares it with; for ``squared`` of the same shape, float32.
    weight: [B], or of as many dimensions as what ``distance`` gives and broadcastable to it (a weight a token).
    distance: at each place: it may have fewer dimensions than the prediction (one a token), and B is the first.
    """

    prediction: Tensor
    target: Tensor
    weight: Tensor
    distance: Distance = squared


@dataclass(frozen=True)
class LatentSpace:
    """Which cached tensors hold the latents, and how the model wants them: ``(latents - shift) * scale``.

    shift_C, scale_C: float32, one value a channel. mean, std: names in the batch of the posterior's two moments,
    [B, C, ...].
    """

    shift_C: Tensor
    scale_C: Tensor
    mean: str = "latent_mean"
    std: str = "latent_std"


class Objective(Protocol):
    """What the loop draws by."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """Draw noise, timesteps and posterior samples for CPU tensors of one micro-batch.

        Args:
            batch: of which the shapes count.
            seeds: one a sample; what is drawn for a sample depends on its seed alone.
        """
        ...

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """As ``draw``, at a fixed place of the noise schedule (0 clean .. 1 noise), for the validation loss."""
        ...
