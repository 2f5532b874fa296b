"""Changes of the noise, as functions on draws of the CPU. Each sample's noise depends on its own numbers alone.

Dimensions: B batch, C channels; the last two of any others are height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lora_rocm.families.objectives.base import normal


def offset_noise(noise: Tensor, rngs: Sequence[torch.Generator], strength: float | Tensor) -> Tensor:
    """Add a random offset per channel to noise [B, C, ...], so that a model can learn very dark and bright images.

    Source: N. Guttenberg, "Diffusion with offset noise", 2023. Draws nothing if ``strength`` is 0.
    """
    if isinstance(strength, float) and strength == 0:
        return noise
    return noise + strength * normal(rngs, (noise.shape[1], *(1,) * (noise.ndim - 2)))


def adaptive_strength(latents: Tensor, strength: float, scale: float) -> Tensor:
    """The strength of the offset, changed by ``scale`` times the size of each channel's mean: [B, C, 1, ...]."""
    means = latents.mean(dim=tuple(range(2, latents.ndim)), keepdim=True)
    return (strength + scale * means.abs()).clamp(min=0.0)


def pyramid_noise(noise: Tensor, rngs: Sequence[torch.Generator], iterations: int, discount: float) -> Tensor:
    """Add enlarged noise of ever lower resolutions to noise [B, C, ...], and scale each sample to variance 1.

    Source: J. Whitaker, "Multi-resolution noise for diffusion model training", 2023. There a batch has one variance.

    Args:
        noise: what the finest level is added to.
        rngs: one generator per sample.
        iterations: the most levels; the last one is the first that is a pixel high or wide.
        discount: the strength of a level is this to the power of its number.
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
