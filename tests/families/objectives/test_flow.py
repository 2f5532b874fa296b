"""Flow matching against diffusers' scheduler and the formulas: mixing, target, distribution of the noise levels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from lora_rocm.families.objectives.base import LatentSpace
from lora_rocm.families.objectives.flow import FlowObjective, shift_of_resolution, shifted
from lora_rocm.recipe.sections import FlowSection

SPACE = LatentSpace(torch.tensor([0.25, -0.5]), torch.tensor([2.0, 0.5]))
FLUX = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}


def objective(config: dict[str, Any] | None = None, **settings: Any) -> FlowObjective:
    return FlowObjective(config or {}, SPACE, FlowSection(**settings), 2)


def batch(rows: int, side: int = 4) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {
        "latent_mean": torch.randn(rows, 2, side, side, generator=rng),
        "latent_std": torch.rand(rows, 2, side, side, generator=rng),
    }


def sigmas(config: dict[str, Any] | None = None, side: int = 2, count: int = 4000, **settings: Any) -> Tensor:
    return objective(config, **settings).draw(batch(1, side), range(count)).tensors["sigma"]


def test_noisy_latents_and_the_target_are_the_formula() -> None:
    data, made = batch(3), objective().draw(batch(3), [5, 6, 7]).tensors
    noisy, target = objective().noised(data, made)
    clean = data["latent_mean"] + data["latent_std"] * made["posterior"]
    clean = (clean - SPACE.shift_C[:, None, None]) * SPACE.scale_C[:, None, None]
    scheduler = FlowMatchEulerDiscreteScheduler()
    sigma = made["sigma"][:, None, None, None]
    assert torch.allclose(noisy, sigma * made["noise"] + (1.0 - sigma) * clean, atol=1e-6)
    assert torch.allclose(target, made["noise"] - clean, atol=1e-6)
    scheduler.set_timesteps(sigmas=[0.75])
    known = {**made, "sigma": torch.full((3,), 0.75)}
    expected = scheduler.scale_noise(clean, scheduler.timesteps[:1], made["noise"])
    assert torch.allclose(objective().noised(data, known)[0], expected, atol=1e-6)
    assert torch.allclose(noisy - sigma * target, clean, atol=1e-5), "a step along the target leads to the image"


@pytest.mark.parametrize("settings", [{}, {"timestep_sampling": "uniform"}])
def test_draws_depend_on_the_seed_alone(settings: dict[str, Any]) -> None:
    together = objective(**settings).draw(batch(3), [4, 5, 6]).tensors
    alone = [objective(**settings).draw(batch(1), [seed]).tensors for seed in (4, 5, 6)]
    for name, tensor in together.items():
        assert torch.equal(tensor, torch.cat([each[name] for each in alone])) and tensor.dtype == torch.float32
    assert together["sigma"].shape == (3,)


def test_a_fixed_draw_has_the_noise_of_its_seed_at_that_level() -> None:
    found = objective().fixed_draw(batch(2), [8, 9], 0.3).tensors
    assert found["sigma"].tolist() == pytest.approx([0.3, 0.3])
    other = objective().fixed_draw(batch(2), [8, 9], 0.9).tensors
    assert torch.equal(found["noise"], other["noise"]) and not torch.equal(found["noise"][0], found["noise"][1])


def test_the_distributions_of_the_noise_level() -> None:
    uniform, normal = sigmas(timestep_sampling="uniform"), sigmas()
    assert torch.bincount((uniform * 4).long(), minlength=4).min() > 900 and 0 <= uniform.min() <= uniform.max() < 1
    logits = torch.logit(normal)
    assert abs(float(logits.mean())) < 0.06 and float(logits.std()) == pytest.approx(1, abs=0.05)
    more = torch.logit(sigmas(logit_mean=1.5, logit_std=0.5))
    assert float(more.mean()) == pytest.approx(1.5, abs=0.03) and float(more.std()) == pytest.approx(0.5, abs=0.03)


def test_a_shift_moves_the_levels_as_diffusers_does() -> None:
    plain = sigmas(timestep_sampling="uniform")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=plain.tolist())
    for found in (
        sigmas(timestep_sampling="uniform", shift=3),
        sigmas({"shift": 3.0}, timestep_sampling="uniform"),
    ):
        assert torch.allclose(found, scheduler.sigmas[:-1], atol=1e-6) and (found >= plain).all()
    assert torch.equal(sigmas({"shift": 3.0}, shift=1), sigmas()), "a number of the recipe's comes first"
    assert shifted(torch.tensor([0.0, 1.0]), 5.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("side", [32, 128])
def test_the_shift_of_a_resolution_counts_tokens(side: int) -> None:
    tokens = (side // 2) ** 2
    mu = calculate_shift(tokens)
    for found in (objective(FLUX), objective(shift="resolution")):
        assert math.log(found.shift(tokens)) == pytest.approx(mu)
    plain, found_B = (sigmas(FLUX, side, 3, timestep_sampling="uniform", **how) for how in ({"shift": 1}, {}))
    assert torch.allclose(found_B, shifted(plain, math.exp(mu)))


def test_the_line_of_a_resolution_has_the_published_ends() -> None:
    line = {"base_image_seq_len": 256, "max_image_seq_len": 8192, "base_shift": 0.5, "max_shift": 0.9}
    assert [math.log(shift_of_resolution(line, tokens)) for tokens in (256, 8192)] == pytest.approx([0.5, 0.9])
