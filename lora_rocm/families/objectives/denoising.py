"""Code that denoising objectives share: their draws, and the distance between prediction and target.

A noise level is a pair of factors, one for the image (signal) and one for the noise. Suffixes: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lora_rocm.families.objectives.base import MEAN, Distance, LatentSpace, Prediction, normal, over, squared
from lora_rocm.recipe.sections import NUM_TIMESTEPS, DenoisingSection

Settings = TypeVar("Settings", bound=DenoisingSection)


@dataclass(frozen=True)
class Levels:
    """The noise levels of B samples, float32 [B].

    signal_B, noise_B: factors of the image and of the noise.
    position_B: position in the noise schedule, from 0 (image) to 1 (noise).
    """

    signal_B: Tensor
    noise_B: Tensor
    position_B: Tensor


@dataclass(frozen=True)
class DenoisingObjective(Generic[Settings]):
    """Base class of denoising objectives.

    scheduler_config: the base's scheduler config, with the recipe's choices applied.
    latents: the latent space in which noise is added.
    settings: the recipe's section.
    """

    scheduler_config: Mapping[str, Any]
    latents: LatentSpace
    settings: Settings

    def noise_draws(
        self, batch: Mapping[str, Tensor], sampling: Mapping[str, Tensor], rngs: Sequence[torch.Generator]
    ) -> dict[str, Tensor]:
        """Return the target's noise, and the noise of the model's input if it differs: float32, in the latents' shape.

        Args:
            batch: CPU tensors. Only their shapes are used, except that an adaptive noise offset depends on the latents.
            sampling: the result of ``LatentSpace.draws``.
            rngs: one generator per sample.
        """
        settings, shape = self.settings, batch[MEAN].shape[1:]
        strength: float | Tensor = settings.noise_offset
        if scale := settings.adaptive_noise_scale:
            strength = adaptive_strength(self.latents.sample(batch, sampling), settings.noise_offset, scale)
        noise = offset_noise(normal(rngs, shape), rngs, strength)
        if levels := settings.multires_noise_iterations:
            noise = pyramid_noise(noise, rngs, levels, settings.multires_noise_discount)
        if not settings.ip_noise_gamma:
            return {"noise": noise}
        return {"noise": noise, "input_noise": noise + settings.ip_noise_gamma * normal(rngs, shape)}

    def loss_draws(self, levels: Levels) -> dict[str, Tensor]:
        """Return values that the loss needs in addition to prediction and target, computed on the host: float32 [B]."""
        if self.settings.loss_type in ("l2", "l1"):
            return {}
        return {"huber_threshold": huber_threshold(self.settings, levels)}

    def prediction(self, predicted: Tensor, target: Tensor, draws: Mapping[str, Tensor]) -> Prediction:
        """Return the prediction with its distance from the target and the weight of its noise level, if any.

        Args:
            predicted: the model's output [B, ...], in the model's dtype.
            target: float32, in the shape of ``predicted``.
            draws: the batch's draws, on the device of the prediction.
        """
        weight_B = draws["snr_weight"] if "snr_weight" in draws else target.new_ones(len(target))
        return Prediction(predicted, target, weight_B, self._distance(draws))

    def _distance(self, draws: Mapping[str, Tensor]) -> Distance:
        kind = self.settings.loss_type
        if kind in ("l2", "l1"):
            return squared if kind == "l2" else absolute
        threshold_B = draws["huber_threshold"]
        if kind == "huber":
            return lambda prediction, target: pseudo_huber(prediction, target, threshold_B)
        return lambda prediction, target: pseudo_huber(prediction, target, threshold_B) / over(threshold_B, target)


def absolute(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the absolute error at each position."""
    return (prediction - target).abs()


def pseudo_huber(prediction: Tensor, target: Tensor, threshold_B: Tensor) -> Tensor:
    """Return ``2 c (sqrt(error**2 + c**2) - c)`` at each position, with the threshold c.

    For errors far below c, this is the squared error. It is computed as a quotient, because the difference loses digits
    of small errors.
    """
    error2, threshold = squared(prediction, target), over(threshold_B, target)
    return 2 * threshold * error2 / ((error2 + threshold.square()).sqrt() + threshold)


def huber_threshold(settings: DenoisingSection, levels: Levels) -> Tensor:
    """Return the threshold of the pseudo-Huber distance at each noise level: float32 [B].

    The schedule "snr" depends only on the ratio of noise and signal, so it also works for flow matching.
    """
    least = settings.huber_c
    if settings.huber_schedule == "constant":
        return torch.full_like(levels.position_B, least * settings.huber_scale)
    if settings.huber_schedule == "exponential":
        return least**levels.position_B * settings.huber_scale
    return (1 - least) * (levels.signal_B / (levels.signal_B + levels.noise_B)).square() + least


def logit_normal(rngs: Sequence[torch.Generator], mean: float, std: float) -> Tensor:
    """Return one position per sample, the sigmoid of a normally distributed number: float32 [B] in (0, 1)."""
    return torch.sigmoid(mean + std * normal(rngs, ()))


def in_range(settings: DenoisingSection, positions_B: Tensor) -> Tensor:
    """Scale positions in [0, 1] to the recipe's range of timesteps. For the whole range they are returned unchanged."""
    low, high = settings.min_timestep, settings.max_timestep
    if (low, high) == (0, NUM_TIMESTEPS):
        return positions_B
    return positions_B * ((high - low) / NUM_TIMESTEPS) + low / NUM_TIMESTEPS


def offset_noise(noise: Tensor, rngs: Sequence[torch.Generator], strength: float | Tensor) -> Tensor:
    """Add a random offset per channel to noise [B, C, ...], so that a model can learn very dark and bright images.

    If ``strength`` is 0, no random numbers are drawn. Source: N. Guttenberg, "Diffusion with offset noise", 2023.
    """
    if isinstance(strength, float) and strength == 0:
        return noise
    return noise + strength * normal(rngs, (noise.shape[1], *(1,) * (noise.ndim - 2)))


def adaptive_strength(latents: Tensor, strength: float, scale: float) -> Tensor:
    """Return the offset's strength plus ``scale`` times the absolute mean of each channel: [B, C, 1, ...]."""
    means = latents.mean(dim=tuple(range(2, latents.ndim)), keepdim=True)
    return (strength + scale * means.abs()).clamp(min=0.0)


def pyramid_noise(noise: Tensor, rngs: Sequence[torch.Generator], iterations: int, discount: float) -> Tensor:
    """Add enlarged noise of lower and lower resolution to noise [B, C, ...], and scale each sample to variance 1.

    Source: J. Whitaker, "Multi-resolution noise for diffusion model training", 2023. In that article, the variance is
    scaled per batch.

    Args:
        noise: the finest level.
        rngs: one generator per sample.
        iterations: maximum number of levels; the first level with a height or width of one pixel is the last.
        discount: base of the strength: level n has the strength ``discount**n``.
    """
    return torch.stack([_pyramid(row, rng, iterations, discount) for row, rng in zip(noise, rngs, strict=True)])


def _pyramid(noise: Tensor, rng: torch.Generator, iterations: int, discount: float) -> Tensor:
    high, wide = noise.shape[-2:]
    for level in range(iterations):
        ratio = (2 + 2 * torch.rand(1, generator=rng).item()) ** level
        rows, columns = max(1, int(high / ratio)), max(1, int(wide / ratio))
        coarse = torch.randn((*noise.shape[:-2], rows, columns), generator=rng).reshape(1, -1, rows, columns)
        enlarged = interpolate(coarse, (high, wide), mode="bilinear", align_corners=False)
        noise = noise + enlarged.reshape(noise.shape) * discount**level
        if rows == 1 or columns == 1:
            break
    return noise / noise.std()
