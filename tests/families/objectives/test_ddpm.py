"""The mathematics against diffusers' own code and against the papers' formulas."""

from __future__ import annotations

import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler
from diffusers.training_utils import compute_snr
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.families.objectives import ddpm, loss_weights
from lora_rocm.families.objectives.base import LatentSpace, generators, normal
from tests.tiny_models import scheduler_config

SEEDS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4)


def of_diffusers(**changes: object) -> DDPMScheduler:
    config = scheduler_config(**changes)
    return DDPMScheduler(**{k: v for k, v in config.items() if k != "timestep_spacing"})


@pytest.mark.parametrize("zero_snr", [False, True])
def test_schedule_is_that_of_diffusers(zero_snr: bool) -> None:
    schedule = ddpm.noise_schedule(scheduler_config(), "epsilon", zero_snr)
    wanted_T = of_diffusers(rescale_betas_zero_snr=zero_snr).alphas_cumprod
    torch.testing.assert_close(schedule.alphas_cumprod_T, wanted_T, rtol=1e-6, atol=0)
    assert len(schedule) == 1000
    assert (schedule.alphas_cumprod_T[-1].item() == 0) is zero_snr


def test_schedule_is_the_sampler_s() -> None:
    sampler = EulerDiscreteScheduler(**scheduler_config())
    schedule = ddpm.noise_schedule(scheduler_config(), "epsilon", False)
    assert torch.allclose(schedule.alphas_cumprod_T, sampler.alphas_cumprod)


@pytest.mark.parametrize("zero_snr", [False, True])
def test_noise_and_velocity_are_those_of_diffusers(zero_snr: bool) -> None:
    scheduler = of_diffusers(rescale_betas_zero_snr=zero_snr)
    schedule = ddpm.noise_schedule(scheduler_config(), "v_prediction", zero_snr)
    latents, noise = torch.randn(3, 4, 8, 8), torch.randn(3, 4, 8, 8)
    timesteps = torch.tensor([0, 500, 999])
    levels = schedule.levels(timesteps)
    assert torch.allclose(ddpm.add_noise(latents, noise, *levels), scheduler.add_noise(latents, noise, timesteps))
    expected = scheduler.get_velocity(latents, noise, timesteps)
    assert torch.allclose(ddpm.velocity(latents, noise, *levels), expected)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 20.0])
def test_min_snr_weight_is_the_formula(gamma: float) -> None:
    timesteps = torch.arange(1000)
    snr = compute_snr(of_diffusers(), timesteps)
    levels = ddpm.noise_schedule(scheduler_config(), "epsilon", False).levels(timesteps)
    clipped = snr.clamp(max=gamma)
    epsilon = loss_weights.min_snr_weight(*levels, gamma, "epsilon")
    velocity = loss_weights.min_snr_weight(*levels, gamma, "v_prediction")
    assert torch.allclose(epsilon, clipped / snr, rtol=1e-4)
    assert torch.allclose(velocity, clipped / (snr + 1), rtol=1e-4)
    assert not torch.allclose(epsilon, velocity)


@pytest.mark.parametrize(("prediction", "weight"), [("epsilon", 1.0), ("v_prediction", 0.0)])
def test_min_snr_weight_at_pure_noise(prediction: str, weight: float) -> None:
    levels = ddpm.noise_schedule(scheduler_config(), prediction, True).levels(torch.tensor([999]))
    assert loss_weights.min_snr_weight(*levels, 5.0, prediction).tolist() == [weight]


def test_min_snr_weight_is_off_at_zero() -> None:
    levels = ddpm.noise_schedule(scheduler_config(), "epsilon", False).levels(torch.tensor([3, 900]))
    assert loss_weights.min_snr_weight(*levels, 0.0, "epsilon").tolist() == [1.0, 1.0]


@given(SEEDS)
def test_draws_depend_on_the_seed_alone(seeds: list[int]) -> None:
    together = normal(generators(seeds), (4, 2, 2))
    alone = [normal(generators([seed]), (4, 2, 2))[0] for seed in seeds]
    assert torch.equal(together, torch.stack(alone))


@given(SEEDS)
def test_timesteps_are_in_range(seeds: list[int]) -> None:
    timesteps = ddpm.uniform_timesteps(generators(seeds), 0, 1000)
    assert timesteps.dtype == torch.int64
    assert 0 <= timesteps.min() and timesteps.max() < 1000


def test_timesteps_are_uniform() -> None:
    timesteps = ddpm.uniform_timesteps(generators(range(4000)), 0, 1000)
    quarters = torch.bincount(timesteps // 250, minlength=4)
    assert quarters.min() > 900
    assert timesteps.max() > 990 and timesteps.min() < 10


def test_posterior_sample() -> None:
    mean, std, noise = (torch.full((1, 4, 2, 2), value) for value in (1.0, 0.5, 2.0))
    space = LatentSpace(torch.ones(4), torch.full((4,), 3.0))
    draws = {**space.draws(generators([1]), (4, 2, 2)), "posterior": noise}
    assert space.sample({"latent_mean": mean, "latent_std": std}, draws).unique().tolist() == [(2.0 - 1.0) * 3.0]


def test_any_number_of_dimensions() -> None:
    """A video of one frame is noised as its image is, and tokens may each have their own level."""
    latents, noise = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    levels = ddpm.noise_schedule(scheduler_config(), "epsilon", False).levels(torch.tensor([20, 800]))
    for function in (ddpm.add_noise, ddpm.velocity):
        video = function(latents[:, :, None], noise[:, :, None], *levels)
        torch.testing.assert_close(video[:, :, 0], function(latents, noise, *levels))
    tokens, level = torch.ones(1, 2, 3), torch.tensor([[1.0, 0.5]])
    assert ddpm.add_noise(tokens, tokens, level, 0 * level)[0, :, 0].tolist() == [1.0, 0.5]
