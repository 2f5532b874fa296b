"""The objective of discrete-time diffusion, and its equations as functions on tensors.

A noisy latent is ``x_t = signal * x_0 + noise_level * eps`` with ``signal = sqrt(alpha_bar)`` and ``noise_level =
sqrt(1 - alpha_bar)`` (DDPM, arXiv 2006.11239, eq. 4). The noise schedule itself comes from diffusers.

Suffixes: T timesteps, B batch, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lora_rocm.device.constants import constant
from lora_rocm.errors import ModelError
from lora_rocm.families.objectives.base import MEAN, Draws, generators, over
from lora_rocm.families.objectives.denoising import DenoisingObjective, Levels, in_range, logit_normal
from lora_rocm.families.objectives.loss_weights import level_weight
from lora_rocm.families.spec import CheckpointSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import NUM_TIMESTEPS, DdpmSection

PREDICTION_TYPES = ("epsilon", "v_prediction")  # supported here; diffusers has more
SCHEDULE_KEYS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")


@dataclass(frozen=True)
class DdpmSettings:
    """The recipe's settings of the noise schedule.

    prediction_type: "epsilon", "v_prediction", or "auto" for the type declared by the base.
    """

    prediction_type: str
    section: DdpmSection

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> DdpmSettings:
        """Return the settings of a recipe. No other code reads these keys."""
        section, model = recipe.objective, recipe.model
        assert isinstance(section, DdpmSection) and isinstance(model, CheckpointSection), "by the family's spec"
        return cls(model.prediction_type, section)

    def decides(self, marks: Collection[str]) -> bool:
        """Whether the recipe or a one-file checkpoint determines the prediction type. ``marks``: see ``decided``."""
        return self.prediction_type != "auto" or "v_pred" in marks

    def decided(self, published: Mapping[str, Any], marks: Collection[str] = ()) -> dict[str, Any]:
        """Return the base's scheduler config with ``prediction_type`` and ``rescale_betas_zero_snr`` resolved.

        Args:
            published: the model's scheduler_config.json.
            marks: tensor names of a one-file checkpoint. By ComfyUI's convention a v-prediction checkpoint has a tensor
                ``v_pred``, and also ``ztsnr`` if its schedule ends in pure noise.
        """
        prediction = self.prediction_type
        if prediction == "auto":
            prediction = "v_prediction" if "v_pred" in marks else published.get("prediction_type", "epsilon")
        chosen = self.section.zero_terminal_snr or "ztsnr" in marks
        zero_snr = chosen or published.get("rescale_betas_zero_snr") or False
        return {**published, "prediction_type": prediction, "rescale_betas_zero_snr": zero_snr}


def check_weighting(section: DdpmSection, config: Mapping[str, Any]) -> None:
    """Refuse a loss weighting that does not fit the base's prediction type.

    Args:
        section: the recipe's section.
        config: the result of ``DdpmSettings.decided``.

    Raises:
        ModelError: weighting-unfit.
    """
    predicts_velocity = config["prediction_type"] == "v_prediction"
    divides = [name for name in ("debiased_estimation_loss", "v_pred_like_loss") if getattr(section, name)]
    if section.scale_v_pred_loss_like_noise_pred and not predicts_velocity:
        key, why = "scale_v_pred_loss_like_noise_pred", "is for velocity predictions, but the base predicts the noise"
    elif section.v_pred_like_loss and predicts_velocity:
        key, why = "v_pred_like_loss", "is for noise predictions, but the base predicts the velocity"
    elif divides and not predicts_velocity and config["rescale_betas_zero_snr"]:
        key, why = divides[0], "divides by the SNR, which is 0 at the end of a schedule with zero terminal SNR"
    else:
        return
    raise ModelError("weighting-unfit", f"{key} {why}.", where=f"objective.{key}", fix="Remove it.")


@dataclass(frozen=True)
class DdpmObjective(DenoisingObjective[DdpmSection]):
    """Implements ``Objective``: predicts noise or velocity of latents that are noised by a DDPM schedule.

    scheduler_config: the result of ``DdpmSettings.decided``.
    """

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule for training."""
        config = self.scheduler_config
        return noise_schedule(config, config["prediction_type"], bool(config["rescale_betas_zero_snr"]))

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """Implements ``Objective.draw``. Timesteps are int64 [B]."""
        rngs = generators(seeds)
        return self._draws(batch, rngs, self._timesteps(rngs))

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """Implements ``Objective.fixed_draw``."""
        timestep = round(position * (len(self.schedule) - 1))
        return self._draws(batch, generators(seeds), torch.full((len(seeds),), timestep, dtype=torch.int64))

    def _timesteps(self, rngs: Sequence[torch.Generator]) -> Tensor:
        """Return one timestep per sample, in the recipe's range and distribution: int64 [B]."""
        settings, count = self.settings, len(self.schedule)
        first, end = (at * count // NUM_TIMESTEPS for at in (settings.min_timestep, settings.max_timestep))
        if settings.timestep_sampling == "uniform":
            return uniform_timesteps(rngs, first, max(end, first + 1))
        position_B = in_range(settings, logit_normal(rngs, settings.logit_mean, settings.logit_std))
        return (position_B * count).long().clamp(first, max(end - 1, first))

    def _draws(self, batch: Mapping[str, Tensor], rngs: list[torch.Generator], timesteps_B: Tensor) -> Draws:
        """Return all tensors that the loss needs in addition to the batch, including values looked up on the host."""
        shape = batch[MEAN].shape[1:]
        sampling = self.latents.draws(rngs, shape)
        noise = self.noise_draws(batch, sampling, rngs)
        signal_B, noise_level_B = self.schedule.levels(timesteps_B)
        weight_B = level_weight(signal_B, noise_level_B, self.settings, self.schedule.prediction_type)
        levels = Levels(signal_B, noise_level_B, timesteps_B / len(self.schedule))
        return Draws(
            {
                "timesteps": timesteps_B,
                "signal": signal_B,
                "noise_level": noise_level_B,
                "snr_weight": weight_B,
                **self.loss_draws(levels),
                **sampling,
                **noise,
            },
            levels.position_B,
        )

    def noised(self, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the model's input and the target, float32 [B, C, ...], on the device of the batch."""
        latents = self.latents.sample(batch, draws)
        levels = (draws["signal"], draws["noise_level"])
        noisy = add_noise(latents, draws.get("input_noise", draws["noise"]), *levels)
        if self.schedule.prediction_type == "v_prediction":
            return noisy, velocity(latents, draws["noise"], *levels)
        return noisy, draws["noise"]


@dataclass(frozen=True)
class NoiseSchedule:
    """The noise schedule that a scheduler config describes.

    alphas_cumprod_T: float32, falling from nearly 1 (clean) to nearly 0 (noise); exactly 0 with zero terminal SNR.
    prediction_type: "epsilon" or "v_prediction".
    """

    alphas_cumprod_T: Tensor
    prediction_type: str

    def __post_init__(self) -> None:
        constant(self.alphas_cumprod_T, "noise schedule")

    def __len__(self) -> int:
        return int(self.alphas_cumprod_T.shape[0])

    def levels(self, timesteps_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (signal_B, noise_level_B), float32: the factors of the clean latents and of the noise."""
        alphas_B = self.alphas_cumprod_T[timesteps_B]
        return alphas_B.sqrt(), (1.0 - alphas_B).sqrt()


def noise_schedule(config: Mapping[str, Any], prediction_type: str, zero_terminal_snr: bool) -> NoiseSchedule:
    """Build the noise schedule of a scheduler config with diffusers' DDPMScheduler.

    Args:
        config: the model's scheduler_config.json.
        prediction_type: "epsilon" or "v_prediction".
        zero_terminal_snr: whether to rescale the betas so that the last step is pure noise (arXiv 2305.08891, algorithm
            1).
    """
    settings = {key: config[key] for key in SCHEDULE_KEYS if config.get(key) is not None}
    scheduler = DDPMScheduler(**settings, rescale_betas_zero_snr=zero_terminal_snr)
    return NoiseSchedule(scheduler.alphas_cumprod.clone(), prediction_type)


def add_noise(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """Return latents noised to the given levels (DDPM, eq. 4). Latents may have any number of dimensions.

    Args:
        latents: [B, C, ...], such as images (BCHW) or videos (BCTHW).
        noise: noise with the shape of ``latents``.
        signal: factor of the latents: [B], any number of leading dimensions of ``latents``, or all of its dimensions.
        noise_level: factor of the noise, with a shape as for ``signal``.
    """
    return over(signal, latents) * latents + over(noise_level, latents) * noise


def velocity(latents: Tensor, noise: Tensor, signal: Tensor, noise_level: Tensor) -> Tensor:
    """Return the target of v-prediction (progressive distillation, arXiv 2202.00512, section 4).

    The arguments are the same as in ``add_noise``.
    """
    return over(signal, latents) * noise - over(noise_level, latents) * latents


def uniform_timesteps(rngs: Sequence[torch.Generator], first: int, end: int) -> Tensor:
    """Return one timestep per sample, uniform over first .. end - 1: int64 [B]."""
    return torch.cat([torch.randint(first, end, (1,), generator=rng) for rng in rngs])
