"""The protocol of an objective: it draws noise and timesteps for a step, and defines the target.

An objective knows no model. The family names the cached tensors that hold the latents, defines their normalisation, and
calls the model in ``predict``. The loss is reduced in ``loss``, the same for all families.
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
    """The random tensors of one micro-batch and the values looked up for them: a pure function of the seeds.

    CPU tensors with a batch dimension. Timesteps are integers or floats, one per sample or one per token.
    """

    tensors: dict[str, Tensor]


MEAN, STD = "latent_mean", "latent_std"
"""Names in the batch of the mean and standard deviation of an image's posterior, [B, C, ...]."""
CONTROL_LATENTS = "control_latents"
"""Name in the batch of the latents of control images, [B, C, ...], if the images have any. The mean is cached."""
HIDDEN_MASK, SEEN_LATENTS = "hidden_mask", "seen_latents"
"""Names in the batch of an inpainting base's inputs: [B, 1, ...], 1 where the image is hidden and 0 where it is seen,
and the latents [B, C, ...] of the seen part. The mean is cached."""

Distance = Callable[[Tensor, Tensor], Tensor]
"""(prediction in float32, target) -> the distance at each position, in float32."""


def squared(prediction: Tensor, target: Tensor) -> Tensor:
    """The squared error at each position."""
    return (prediction - target).square()


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for a micro-batch, and its target.

    prediction: [B, ...], in the model's number format.
    target: the second argument of ``distance``; for ``squared`` of the same shape, float32.
    weight: [B], or broadcastable to the result of ``distance`` with equally many dimensions (one weight per token).
    distance: at each position; it may have fewer dimensions than the prediction (one value per token), B first.
    measures: other values of each sample, float32 [B] without gradient, that are logged with the losses.
    """

    prediction: Tensor
    target: Tensor
    weight: Tensor
    distance: Distance = squared
    measures: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LatentSpace:
    """The cached tensors that hold the latents, and their normalisation ``(latents - shift) * scale``.

    shift_C, scale_C: float32, one value per channel.
    """

    shift_C: Tensor
    scale_C: Tensor

    def __post_init__(self) -> None:
        constant(self.shift_C, "shift of the latents")
        constant(self.scale_C, "scale of the latents")

    def draws(self, rngs: Sequence[torch.Generator], shape: Sequence[int]) -> dict[str, Tensor]:
        """The draws that ``sample`` needs, for latents of ``shape`` (without B): float32, one row per generator."""
        return {
            "posterior": normal(rngs, shape),
            "latent_shift": self.shift_C.expand(len(rngs), -1).contiguous(),
            "latent_scale": self.scale_C.expand(len(rngs), -1).contiguous(),
        }

    def sample(self, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> Tensor:
        """Normalised latents, float32 [B, C, ...], sampled from the VAE's diagonal Gaussian posterior.

        Source: arXiv 1312.6114, section 2.4.
        """
        return self.normalised(batch[MEAN] + batch[STD] * draws["posterior"], draws)

    def normalised(self, latents: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Normalised latents [B, C, ...]. ``draws``: the result of ``draws``, on the device of the latents."""
        shift, scale = (over(draws[name], latents) for name in ("latent_shift", "latent_scale"))
        return (latents - shift) * scale


class Objective(Protocol):
    """The protocol that the training loop uses to draw noise and timesteps."""

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """Draw noise, timesteps and posterior samples for one micro-batch of CPU tensors.

        Args:
            batch: only its shapes are used, and for an adaptive noise offset the values of the latents.
            seeds: one per sample; a sample's draws depend only on its seed and its latents.
        """

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """As ``draw``, but at a fixed position of the noise schedule (0 clean .. 1 noise), for the validation loss."""


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator per sample. Its numbers depend only on its seed, not on the batch or the device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def normal(rngs: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Standard normal noise of ``shape`` for each sample: float32 [B, *shape]."""
    return torch.stack([torch.randn(tuple(shape), generator=rng) for rng in rngs])


def over(values: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of length 1 to ``values`` so that they broadcast over ``like`` (one value per sample: [B])."""
    return values.reshape(*values.shape, *(1,) * (like.ndim - values.ndim))
