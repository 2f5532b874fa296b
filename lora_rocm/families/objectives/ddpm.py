"""The mathematics of discrete-time diffusion training, as functions on tensors.

A noisy latent is ``x_t = signal * x_0 + noise_level * eps`` with ``signal = sqrt(alpha_bar)`` and
``noise_level = sqrt(1 - alpha_bar)`` (DDPM, arXiv 2006.11239, eq. 4). The noise schedule itself is diffusers' own.
Suffixes: T timesteps, B batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

PREDICTION_TYPES = ("epsilon", "v_prediction")  # that the losses here know; diffusers knows more
SCHEDULE_KEYS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")


@dataclass(frozen=True)
class NoiseSchedule:
    """What training needs of a scheduler config.

    alphas_cumprod_T: float32, falling from nearly 1 (clean) to nearly 0 (noise), exactly 0 with zero terminal SNR.
    prediction_type: "epsilon" or "v_prediction".
    """

    alphas_cumprod_T: Tensor
    prediction_type: str

    def __len__(self) -> int:
        return self.alphas_cumprod_T.shape[0]

    def levels(self, timesteps_B: Tensor) -> tuple[Tensor, Tensor]:
        """(signal_B, noise_level_B), float32: the factors of the clean latent and of the noise."""
        alphas_B = self.alphas_cumprod_T[timesteps_B]
        return alphas_B.sqrt(), (1.0 - alphas_B).sqrt()


def noise_schedule(config: Mapping[str, Any], prediction_type: str, zero_terminal_snr: bool) -> NoiseSchedule:
    """The schedule of a diffusers scheduler config, by diffusers' own DDPMScheduler.

    Args:
        config: the model's scheduler_config.json.
        prediction_type: "epsilon" or "v_prediction".
        zero_terminal_snr: rescale the betas so that the last step is pure noise (arXiv 2305.08891, algorithm 1).
    """
    settings = {key: config[key] for key in SCHEDULE_KEYS if config.get(key) is not None}
    scheduler = DDPMScheduler(**settings, rescale_betas_zero_snr=zero_terminal_snr)
    return NoiseSchedule(scheduler.alphas_cumprod.clone(), prediction_type)


def over(values: Tensor, like: Tensor) -> Tensor:
    """Give values of the first dimensions of a tensor (a number a sample: [B]) ones behind, so that they broadcast."""
    return values.reshape(*values.shape, *(1,) * (like.ndim - values.ndim))


def add_noise(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """The noisy latents at the given levels (DDPM, eq. 4), for latents of any number of dimensions.

    Args:
        latents: [B, C, ...]: images (BCHW), videos (BCTHW), ...
        noise: of the same shape.
        signal: [B], or more of the first dimensions, or of as many dimensions as ``latents``.
        noise_level: likewise.
    """
    return over(signal, latents) * latents + over(noise_level, latents) * noise


def velocity(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """The v target (progressive distillation, arXiv 2202.00512, section 4); arguments as of ``add_noise``."""
    return over(signal, latents) * noise - over(noise_level, latents) * latents


def min_snr_weight(signal_B: Tensor, noise_level_B: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """The min-SNR-gamma weight of each sample (arXiv 2303.09556, eq. 10 and section 3.4); all 1 when gamma is 0.

    With ``snr = signal**2 / noise_level**2`` the weight of an epsilon loss is ``min(snr, gamma) / snr``, that of a
    v loss ``min(snr, gamma) / (snr + 1)``. Written with the levels instead of the SNR, so that pure noise (SNR 0, zero
    terminal SNR) needs no case: the epsilon weight is 1 there and the v weight 0.
    """
    if gamma == 0:
        return torch.ones_like(signal_B)
    signal_power_B, noise_power_B = signal_B.square(), noise_level_B.square()
    if prediction_type == "v_prediction":  # signal power and noise power add up to 1
        return torch.minimum(signal_power_B, gamma * noise_power_B)
    return (gamma * noise_power_B / signal_power_B).clamp(max=1.0)


def sample_posterior(mean: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """A sample of the VAE's diagonal Gaussian posterior (arXiv 1312.6114, section 2.4)."""
    return mean + std * noise


def generators(seeds: Sequence[int]) -> list[torch.Generator]:
    """One CPU generator a sample: what it draws depends on its seed alone, not on the batch or the device."""
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def normal(rngs: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Standard normal numbers of ``shape`` for each sample: float32 [B, *shape]."""
    return torch.stack([torch.randn(tuple(shape), generator=rng) for rng in rngs])


def uniform_timesteps(rngs: Sequence[torch.Generator], count: int) -> Tensor:
    """A timestep for each sample, uniform over 0 .. count - 1: int64 [B]."""
    return torch.cat([torch.randint(count, (1,), generator=rng) for rng in rngs])


def offset_noise(noise: Tensor, rngs: Sequence[torch.Generator], strength: float) -> Tensor:
    """Noise [B, C, ...] with a random shift of each channel, so that a model can learn very dark and bright images.

    Source: N. Guttenberg, "Diffusion with offset noise", 2023. Draws nothing when ``strength`` is 0.
    """
    if strength == 0:
        return noise
    return noise + strength * normal(rngs, (noise.shape[1], *(1,) * (noise.ndim - 2)))
