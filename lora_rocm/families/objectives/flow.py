"""The objective of flow matching along straight lines (rectified flow, arXiv 2209.03003; SD3, arXiv 2403.03206).

A noisy latent is ``x_sigma = (1 - sigma) * x_0 + sigma * eps``, so sigma 0 is clean and sigma 1 is noise. The target is
the velocity ``eps - x_0``.

Suffixes: B batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_rocm.families.objectives.base import MEAN, Draws, generators, over
from lora_rocm.families.objectives.denoising import DenoisingObjective, Levels, in_range, logit_normal
from lora_rocm.recipe.sections import NUM_TIMESTEPS, FlowSection


@dataclass(frozen=True)
class FlowObjective(DenoisingObjective[FlowSection]):
    """Implements ``Objective``: predicts the velocity of latents mixed with noise.

    Sigma is drawn in float32 and is not rounded: the image is mixed with the same value that the model gets. If a
    family's model rounds its time to another dtype, the family rounds ``draws["sigma"]`` before it calls ``noised``.

    scheduler_config: the base's scheduler_config.json.
    patch: side of the square of latents that is one token of the model.
    """

    patch: int

    def draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int]) -> Draws:
        """Implements ``Objective.draw``. Draws sigma, float32 [B] in [0, 1]."""
        rngs, settings = generators(seeds), self.settings
        if settings.timestep_sampling == "uniform":
            sigma_B = torch.cat([torch.rand(1, generator=rng) for rng in rngs])
        else:
            sigma_B = logit_normal(rngs, settings.logit_mean, settings.logit_std)
        high, wide = batch[MEAN].shape[-2:]
        shift = self.shift(high // self.patch * (wide // self.patch))
        return self._draws(batch, rngs, in_range(settings, shifted(sigma_B, shift)))

    def fixed_draw(self, batch: Mapping[str, Tensor], seeds: Sequence[int], position: float) -> Draws:
        """Implements ``Objective.fixed_draw``. The position is sigma."""
        return self._draws(batch, generators(seeds), torch.full((len(seeds),), position))

    def _draws(self, batch: Mapping[str, Tensor], rngs: list[torch.Generator], sigma_B: Tensor) -> Draws:
        sampling = self.latents.draws(rngs, batch[MEAN].shape[1:])
        loss = self.loss_draws(Levels(1 - sigma_B, sigma_B, sigma_B))
        return Draws({"sigma": sigma_B, **loss, **sampling, **self.noise_draws(batch, sampling, rngs)}, sigma_B)

    def noised(self, batch: Mapping[str, Tensor], draws: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the model's input and the target, float32 [B, C, ...], on the device of the batch."""
        latents, noise = self.latents.sample(batch, draws), draws["noise"]
        sigma = over(draws["sigma"], latents)
        return (1 - sigma) * latents + sigma * draws.get("input_noise", noise), noise - latents

    def shift(self, tokens: int) -> float:
        """Return the shift of sigma in training, for an image with this many tokens."""
        wanted, config = self.settings.shift, self.scheduler_config
        if wanted == "auto":
            return published_shift(config, tokens)
        return shift_of_resolution(config, tokens) if isinstance(wanted, str) else wanted

    def kohya_fields(self) -> dict[str, object]:
        """Return the distribution of sigma as ``ss_`` fields of kohya's flux_train_network.py.

        For kohya, sigmoid, shift and flux_shift are logit-normal, and sigma is uniform with a shift. For distributions
        that kohya's scripts cannot draw, ss_timestep_sampling is None.
        """
        settings, config = self.settings, self.scheduler_config
        grows = settings.shift == "resolution" or (settings.shift == "auto" and config.get("use_dynamic_shifting"))
        fixed = settings.shift if isinstance(settings.shift, float) else fixed_shift(config)
        plain = settings.logit_mean == 0 and (settings.min_timestep, settings.max_timestep) == (0, NUM_TIMESTEPS)
        if settings.timestep_sampling == "uniform":
            name = None if grows else "uniform" if fixed == 1.0 else "sigma"
        else:
            name = "flux_shift" if grows else "sigmoid" if fixed == 1.0 else "shift"
        return {
            "ss_timestep_sampling": name if plain else None,
            "ss_discrete_flow_shift": None if grows else fixed,
            "ss_sigmoid_scale": settings.logit_std if settings.logit_std != 1.0 else None,
        }


def shifted(sigma: Tensor, shift: float) -> Tensor:
    """Move sigmas towards noise (shift above 1) or towards the image (below 1); 0 and 1 do not change.

    Source: arXiv 2403.03206.
    """
    return shift * sigma / (1 + (shift - 1) * sigma)


def published_shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return the shift that a scheduler config specifies for sampling an image with this many tokens."""
    if config.get("use_dynamic_shifting"):
        return shift_of_resolution(config, tokens)
    return fixed_shift(config)


def fixed_shift(config: Mapping[str, Any]) -> float:
    """Return a scheduler config's shift for all resolutions, or 1 if it is missing or null, as in diffusers."""
    return 1.0 if config.get("shift") is None else float(config["shift"])


def shift_of_resolution(config: Mapping[str, Any], tokens: int) -> float:
    """Return a shift that grows with the resolution: exp(mu), with mu interpolated linearly between two lengths.

    Args:
        config: a scheduler config with the two lengths in tokens and a mu for each. Missing values are FLUX.1's, as in
            diffusers.
        tokens: length of the image in the model's tokens.
    """
    short, long = int(config.get("base_image_seq_len") or 256), int(config.get("max_image_seq_len") or 4096)
    low, high = float(config.get("base_shift") or 0.5), float(config.get("max_shift") or 1.15)
    return math.exp(low + (high - low) * (tokens - short) / (long - short))
