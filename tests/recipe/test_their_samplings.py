"""The advised keys draw the noise levels of the other program. Its formulas are written here from its source."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.errors import RecipeError
from lora_rocm.families.objectives.flow import FlowObjective, shift_of_resolution, shifted
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.peer_names import TheirSampling, advice, peer_names, value_advice
from lora_rocm.recipe.sections import FlowSection

DRAWS, MOST = 40_000, 0.02
TOKENS = 4096
"""1,024 x 1,024 pixels."""
Draw = Callable[[torch.Generator], Tensor]


def normal(rng: torch.Generator) -> Tensor:
    return torch.randn(DRAWS, generator=rng)


def uniform(rng: torch.Generator) -> Tensor:
    return torch.rand(DRAWS, generator=rng)


def kohya_time_shift(mu: float, t: Tensor) -> Tensor:
    return math.exp(mu) / (math.exp(mu) + (1 / t - 1))


def kohya_sigma(rng: torch.Generator) -> Tensor:
    timesteps = torch.linspace(1000, 1, 1000)
    sigmas = timesteps / 1000
    sigmas = 3.0 * sigmas / (1 + (3.0 - 1) * sigmas)
    return sigmas[(uniform(rng) * 1000).long()]


def ai_toolkit_flux_shift(rng: torch.Generator) -> Tensor:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    mu = (1.15 - 0.5) / (4096 - 256) * TOKENS + 0.5 - (1.15 - 0.5) / (4096 - 256) * 256
    return kohya_time_shift(mu, sigmas)[(uniform(rng) * 1000).long()]


def mu(tokens: int) -> float:
    slope = (1.15 - 0.5) / (4096 - 256)
    return slope * tokens + 0.5 - slope * 256


THEIRS: dict[tuple[str, str], Draw] = {
    ("kohya", "sigma"): kohya_sigma,
    ("kohya", "uniform"): uniform,
    ("kohya", "sigmoid"): lambda rng: normal(rng).sigmoid(),
    ("kohya", "shift"): lambda rng: 3 * normal(rng).sigmoid() / (1 + 2 * normal(rng).sigmoid()),
    ("kohya", "flux_shift"): lambda rng: kohya_time_shift(mu(TOKENS), normal(rng).sigmoid()),
    ("ai-toolkit", "sigmoid"): lambda rng: 1 - normal(rng).sigmoid(),
    ("ai-toolkit", "linear"): lambda rng: (torch.linspace(1000, 1, 1000) / 1000)[(uniform(rng) * 1000).long()],
    ("ai-toolkit", "weighted"): lambda rng: (torch.linspace(1000, 1, 1000) / 1000)[(uniform(rng) * 1000).long()],
    ("ai-toolkit", "flux_shift"): ai_toolkit_flux_shift,
    ("ai-toolkit", "shift"): ai_toolkit_flux_shift,  # of FLUX.1: its scheduler shifts by resolution
    ("OneTrainer", "uniform"): uniform,
    ("OneTrainer", "logit_normal"): lambda rng: normal(rng).sigmoid(),
}


def kohya_shift(rng: torch.Generator) -> Tensor:
    sigmas = normal(rng).sigmoid()
    return sigmas * 3.0 / (1 + (3.0 - 1) * sigmas)


THEIRS["kohya", "shift"] = kohya_shift


def ours(row: TheirSampling, rng: torch.Generator, low: float = 0.0, high: float = 1.0, shift: float = 0.0) -> Tensor:
    """The noise levels of our keys, as ``FlowObjective.draw`` computes them."""
    sigma = uniform(rng) if row.timestep_sampling == "uniform" else normal(rng).sigmoid()
    by_row = shift_of_resolution({}, TOKENS) if row.shift in ("resolution", "auto") else float(row.shift)
    return low + (high - low) * shifted(sigma, shift or by_row)


def distance(one: Tensor, other: Tensor) -> float:
    """The statistic of Kolmogorov and Smirnov."""
    places = torch.cat([one, other]).sort().values
    shares = [torch.searchsorted(each.sort().values, places, right=True) / len(each) for each in (one, other)]
    return float((shares[0] - shares[1]).abs().max())


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("row", peer_names().samplings, ids=lambda row: f"{row.program} {row.name}")
def test_what_is_advised_draws_their_noise_levels(row: TheirSampling) -> None:
    theirs = THEIRS[row.program, row.name](rng(1))
    assert distance(ours(row, rng(2)), theirs) < MOST
    other = TheirSampling(row.program, row.name, row.timestep_sampling, "3" if row.shift == "1" else "1")
    assert distance(ours(other, rng(2)), theirs) > 5 * MOST, "the control"
    assert row.ours in value_advice("objective.timestep_sampling", row.name) or row.name == row.timestep_sampling
    assert row.ours in advice()["timestep_type"]


@pytest.mark.parametrize(("low", "high", "shift"), [(0.0, 0.5, 3.0), (0.2, 0.9, 3.0), (0.3, 1.0, 0.5), (0.1, 0.6, 1.0)])
@pytest.mark.parametrize("name", ["uniform", "logit_normal"])
def test_onetrainer_s_range_is_shifted_as_the_advice_says(name: str, low: float, high: float, shift: float) -> None:
    base = THEIRS["OneTrainer", name](rng(1))
    ranged = low + (high - low) * base
    theirs = shift * ranged / ((shift - 1) * ranged + 1)
    row = next(row for row in peer_names().samplings if (row.program, row.name) == ("OneTrainer", name))
    ends = [shift * end / (1 + (shift - 1) * end) for end in (low, high)]
    advised = (1 + (shift - 1) * high) / (1 + (shift - 1) * low)
    assert distance(ours(row, rng(2), *ends, shift=advised), theirs) < MOST
    if shift != 1:
        assert distance(ours(row, rng(2), low, high, shift=shift), theirs) > 2 * MOST, "the control"
    assert "(1 + (S - 1) max) / (1 + (S - 1) min)" in advice()["min_noising_strength"]


def test_a_recipe_with_their_word_is_told_ours(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model: {family: flux, name_or_path: x}\ndata: {path: .}\nobjective: {timestep_sampling: sigmoid}\n"
        "train: {max_train_steps: 2}\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert "objective.timestep_sampling" in str(caught.value) and "shift: 1" in str(caught.value)


FLUX, FIXED = {"use_dynamic_shifting": True, "shift": 3.0}, {"shift": 3.0}


@pytest.mark.parametrize(("settings", "config", "name", "shift"), [
    ({"shift": 1.0}, FLUX, "sigmoid", 1.0),
    ({}, FLUX, "flux_shift", None),
    ({"shift": "resolution"}, FIXED, "flux_shift", None),
    ({}, FIXED, "shift", 3.0),
    ({"shift": 2.5}, FLUX, "shift", 2.5),
    ({"timestep_sampling": "uniform", "shift": 1.0}, FLUX, "uniform", 1.0),
    ({"timestep_sampling": "uniform"}, FIXED, "sigma", 3.0),
    ({"timestep_sampling": "uniform"}, FLUX, None, None),
    ({"logit_mean": 0.5}, FIXED, None, 3.0),
    ({"min_timestep": 100}, FIXED, None, 3.0),
])  # fmt: skip
def test_the_metadata_name_what_was_drawn_as_kohya_s_scripts_do(
    settings: dict[str, Any], config: dict[str, Any], name: str | None, shift: float | None
) -> None:
    objective = FlowObjective(config, None, FlowSection(**settings), 2)  # type: ignore[arg-type]
    fields = objective.kohya_fields()
    assert (fields["ss_timestep_sampling"], fields["ss_discrete_flow_shift"]) == (name, shift)
