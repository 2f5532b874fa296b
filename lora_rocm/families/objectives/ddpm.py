"""The objective of discrete-time diffusion, and its equations as functions on tensors.

A noisy latent is ``x_t = signal * x_0 + noise_level * eps`` with ``signal = sqrt(alpha_bar)`` and ``noise_level =
sqrt(1 - alpha_bar)`` (DDPM, arXiv 2006.11239, eq. 4). The noise schedule itself comes from diffusers. Suffixes: T
timesteps, B batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lora_rocm.families.objectives.base import Draws, LatentSpace, generators, normal, over
from lora_rocm.families.spec import CheckpointSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import DdpmSection

PREDICTION_TYPES = ("epsilon", "v_prediction")  # supported here; diffusers has more
SCHEDULE_KEYS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")


@dataclass(frozen=True)
class DdpmSettings:
    """The recipe's settings of the objective.

    prediction_type: "epsilon", "v_prediction", or "auto" for the type that the base declares.
    """

    prediction_type: str = "auto"
    zero_terminal_snr: bool = False
    min_snr_gamma: float = 0.0
    noise_offset: float = 0.0

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> DdpmSettings:
        """Read the recipe's keys. Only this function does."""
        section, model = recipe.objective, recipe.model
        assert isinstance(section, DdpmSection) and isinstance(model, CheckpointSection), "as the family's spec says"
        return cls(model.prediction_type, section.zero_terminal_snr, section.min_snr_gamma, section.noise_offset)

    def decided(self, published: Mapping[str, Any], marks: Collection[str] = ()) -> dict[str, Any]:
        """The base's scheduler config with ``prediction_type`` and ``rescale_betas_zero_snr`` resolved.

        Args:
            published: the model's scheduler_config.json.
            marks: tensor names of a one-file checkpoint. By ComfyUI's convention a v-prediction checkpoint has a tensor
                ``v_pred``, and ``ztsnr`` if its schedule ends in pure noise.
        """
        prediction = self.prediction_type
        if prediction == "auto":
            prediction = "v_prediction" if "v_pred" in marks else published.get("prediction_type", "epsilon")
        zero_snr = self.zero_terminal_snr or "ztsnr" in marks or bool(published.get("rescale_betas_zero_snr"))
        return {**published, "prediction_type": prediction, "rescale_betas_zero_snr": zero_snr}


@dataclass(frozen=True)
class DdpmObjective:
    """Implements ``Objective``: predict the noise or the velocity of latents noised by a DDPM schedule.

    scheduler_config: the result of ``DdpmSettings.decided``.
    """

    scheduler_config: Mapping[str, Any]
    latents: LatentSpace
    settings: DdpmSettings

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of training."""
        config = self.scheduler_config
        return noise_schedule(config, config["prediction_type"], bool(config["rescale_betas_zero_snr"]))

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """As ``Objective.draw``. Timesteps are int64 [B]."""
        rngs = generators(seeds)
        return self._draws(batch, rngs, uniform_timesteps(rngs, len(self.schedule)))

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """As ``Objective.fixed_draw``."""
        timestep = round(position * (len(self.schedule) - 1))
        return self._draws(batch, generators(seeds), torch.full((len(seeds),), timestep, dtype=torch.int64))

    def _draws(self, batch: Mapping[str, Tensor], rngs: list[torch.Generator], timesteps_B: Tensor) -> Draws:
        """All tensors that the loss needs besides the batch, including those looked up on the host."""
        shape = batch[self.latents.mean].shape[1:]
        sampling = self.latents.draws(rngs, shape)
        noise = offset_noise(normal(rngs, shape), rngs, self.settings.noise_offset)
        signal_B, noise_level_B = self.schedule.levels(timesteps_B)
        weight_B = min_snr_weight(signal_B, noise_level_B, self.settings.min_snr_gamma, self.schedule.prediction_type)
        return Draws(
            {
                "timesteps": timesteps_B,
                "noise": noise,
                "signal": signal_B,
                "noise_level": noise_level_B,
                "snr_weight": weight_B,
                **sampling,
            }
        )

    def noised(self, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(model input, target), float32 [B, C, ...], on the device of the batch."""
        latents = self.latents.sample(batch, draws)
        levels = (draws["signal"], draws["noise_level"])
        noisy = add_noise(latents, draws["noise"], *levels)
        if self.schedule.prediction_type == "v_prediction":
            return noisy, velocity(latents, draws["noise"], *levels)
        return noisy, draws["noise"]


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise schedule of a scheduler config.

    alphas_cumprod_T: float32, falling from nearly 1 (clean) to nearly 0 (noise); exactly 0 with zero terminal SNR.
    prediction_type: "epsilon" or "v_prediction".
    """

    alphas_cumprod_T: Tensor
    prediction_type: str

    def __len__(self) -> int:
        return int(self.alphas_cumprod_T.shape[0])

    def levels(self, timesteps_B: Tensor) -> tuple[Tensor, Tensor]:
        """(signal_B, noise_level_B), float32: the factors of the clean latents and of the noise."""
        alphas_B = self.alphas_cumprod_T[timesteps_B]
        return alphas_B.sqrt(), (1.0 - alphas_B).sqrt()


def noise_schedule(config: Mapping[str, Any], prediction_type: str, zero_terminal_snr: bool) -> NoiseSchedule:
    """Build the schedule of a diffusers scheduler config with diffusers' DDPMScheduler.

    Args:
        config: the model's scheduler_config.json.
        prediction_type: "epsilon" or "v_prediction".
        zero_terminal_snr: rescale the betas so that the last step is pure noise (arXiv 2305.08891, algorithm 1).
    """
    settings = {key: config[key] for key in SCHEDULE_KEYS if config.get(key) is not None}
    scheduler = DDPMScheduler(**settings, rescale_betas_zero_snr=zero_terminal_snr)
    return NoiseSchedule(scheduler.alphas_cumprod.clone(), prediction_type)


def add_noise(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """Noisy latents at the given levels (DDPM, eq. 4), for latents of any number of dimensions.

    Args:
        latents: [B, C, ...]: images (BCHW), videos (BCTHW), ...
        noise: the shape of ``latents``.
        signal: [B], any number of leading dimensions of ``latents``, or as many dimensions as ``latents``.
        noise_level: as ``signal``.
    """
    return over(signal, latents) * latents + over(noise_level, latents) * noise


def velocity(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """The v target (progressive distillation, arXiv 2202.00512, section 4). Arguments as in ``add_noise``."""
    return over(signal, latents) * noise - over(noise_level, latents) * latents


def min_snr_weight(signal_B: Tensor, noise_level_B: Tensor, gamma: float, prediction_type: str) -> Tensor:
    """Min-SNR-gamma weight of each sample (arXiv 2303.09556, eq. 10 and section 3.4), float32 [B]; 1 if gamma is 0.

    With ``snr = signal**2 / noise_level**2`` the weight of an epsilon loss is ``min(snr, gamma) / snr``, and that of a
    v loss ``min(snr, gamma) / (snr + 1)``. The formulas use the levels instead of the SNR, so pure noise (SNR 0) needs
    no special case: the epsilon weight is 1 there, the v weight 0.
    """
    if gamma == 0:
        return torch.ones_like(signal_B)
    signal_power_B, noise_power_B = signal_B.square(), noise_level_B.square()
    if prediction_type == "v_prediction":  # signal power and noise power add up to 1
        return torch.minimum(signal_power_B, gamma * noise_power_B)
    return (gamma * noise_power_B / signal_power_B).clamp(max=1.0)


def uniform_timesteps(rngs: Sequence[torch.Generator], count: int) -> Tensor:
    """One timestep per sample, uniform over 0 .. count - 1: int64 [B]."""
    return torch.cat([torch.randint(count, (1,), generator=rng) for rng in rngs])


def offset_noise(noise: Tensor, rngs: Sequence[torch.Generator], strength: float) -> Tensor:
    """Add a random offset per channel to noise [B, C, ...], so that a model can learn very dark and bright images.

    Source: N. Guttenberg, "Diffusion with offset noise", 2023. Draws nothing if ``strength`` is 0.
    """
    if strength == 0:
        return noise
    return noise + strength * normal(rngs, (noise.shape[1], *(1,) * (noise.ndim - 2)))
