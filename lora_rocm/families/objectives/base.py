"""The protocol of an objective, which draws noise and timesteps for a step and defines the target.

An objective does not depend on a model. The family names the cached tensors that contain the latents, defines their
normalisation, and calls the model in ``predict``. The module ``loss`` reduces the loss in the same way for all
families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lora_rocm.device.constants import constant


@dataclass(frozen=True)
class Draws:
    """The random tensors of one micro-batch, and values looked up for them.

    They depend only on the seeds and the batch. All are CPU tensors with a batch dimension. Timesteps are integers or
    floats, one per sample or one per token.

    position_B: position of each sample in the noise schedule, from 0 (image) to 1 (noise), float32 [B]; None if there
        is no noise. It is recorded with the sample's loss, and not sent to the device.
    """

    tensors: dict[str, Tensor]
    position_B: Tensor | None = None


MEAN, STD = "latent_mean", "latent_std"
"""Names in the batch of the mean and standard deviation of an image's posterior, shape [B, C, ...]."""
CONTROL_LATENTS = "control_latents"
"""Name in the batch of the latents of control images, shape [B, C, ...], if the samples have any. The cache contains
the posterior's mean.
"""
HIDDEN_MASK, SEEN_LATENTS = "hidden_mask", "seen_latents"
"""Names in the batch of an inpainting model's inputs: the mask [B, 1, ...], 1 where the image is hidden and 0 where it
is visible, and the latents [B, C, ...] of the visible part. The cache contains the posterior's mean.
"""

Distance = Callable[[Tensor, Tensor], Tensor]
"""Maps (prediction in float32, target) to the distance at each position, in float32."""


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the squared error at each position."""
    return (prediction - target).square()


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for a micro-batch, with its target.

    prediction: [B, ...], in the model's dtype.
    target: second argument of ``distance``. For ``squared`` it has the prediction's shape, in float32.
    weight: [B], or as many dimensions as the result of ``distance`` and broadcastable to it (one weight per token).
    distance: function of the distance at each position. Its result begins with dimension B, and may have fewer
        dimensions than the prediction (one value per token).
    measures: additional values per sample that are logged with the losses, float32 [B] without gradient.
    """

    prediction: Tensor
    target: Tensor
    weight: Tensor
    distance: Distance = squared
    measures: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LatentSpace:
    """The latents' tensors in the cache, and the normalisation ``(latents - shift) * scale``.

    shift_C, scale_C: float32, one value per channel.
    """

    shift_C: Tensor
    scale_C: Tensor

    def __post_init__(self) -> None:
        constant(self.shift_C, "shift of the latents")
        constant(self.scale_C, "scale of the latents")

    def draws(self, rngs: Sequence[torch.Generator], shape: Sequence[int]) -> dict[str, Tensor]:
        """Return the random numbers that ``sample`` needs: float32, one row per generator.

        ``shape`` is the shape of the latents without B.
        """
        return {
            "posterior": normal(rngs, shape),
            "latent_shift": self.shift_C.expand(len(rngs), -1).contiguous(),
            "latent_scale": self.scale_C.expand(len(rngs), -1).contiguous(),
        }

    def sample(self, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> Tensor:
        """Return normalised latents, float32 [B, C, ...], sampled from the VAE's diagonal Gaussian posterior.

        Source: arXiv 1312.6114, section 2.4.
        """
        return self.normalised(batch[MEAN] + batch[STD] * draws["posterior"], draws)

    def normalised(self, latents: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Return normalised latents [B, C, ...]. ``draws``: the result of ``draws``, on the device of the latents."""
        shift, scale = (over(draws[name], latents) for name in ("latent_shift", "latent_scale"))
        return (latents - shift) * scale


class Objective(Protocol):
    """The protocol by which the training loop draws noise and timesteps."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """Draw noise, timesteps and posterior samples for one micro-batch of CPU tensors.

        Args:
            batch: cached tensors. Only their shapes are used, except that an adaptive noise offset depends on the
                latents.
            seeds: one seed per sample; a sample's draws depend only on its seed and its latents.
        """

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """Draw like ``draw``, but at a fixed position of the noise schedule (0 clean .. 1 noise).

        Used for the validation loss.
        """


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """Return one CPU generator per sample. Its numbers depend only on its seed, not on the batch or the device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def normal(rngs: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Return standard normal noise of ``shape`` for each sample: float32 [B, *shape]."""
    return torch.stack([torch.randn(tuple(shape), generator=rng) for rng in rngs])


def over(values: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of length 1 to ``values`` so that it broadcasts over ``like``.

    ``values`` has, for example, one value per sample: [B].
    """
    return values.reshape(*values.shape, *(1,) * (like.ndim - values.ndim))
