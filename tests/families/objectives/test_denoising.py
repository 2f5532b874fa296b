"""Weights, distances and ranges of noise levels against the formulas of the trainers that they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.errors import ModelError
from lora_rocm.families.objectives.base import LatentSpace
from lora_rocm.families.objectives.ddpm import DdpmObjective, check_weighting
from lora_rocm.families.objectives.denoising import Levels, huber_threshold
from lora_rocm.families.objectives.flow import FlowObjective, shifted
from lora_rocm.families.objectives.loss import reduced
from lora_rocm.families.objectives.loss_weights import level_weight
from lora_rocm.recipe.sections import DdpmSection, FlowSection
from tests.tiny_models import scheduler_config
from tests.wording import Worded, saying, worded

SPACE = LatentSpace(torch.tensor([0.25, -0.5]), torch.tensor([2.0, 0.5]))
ALL_T = torch.arange(1000)


def ddpm_objective(prediction: str = "epsilon", zero_snr: bool = False, **settings: Any) -> DdpmObjective:
    config = {**scheduler_config(), "prediction_type": prediction, "rescale_betas_zero_snr": zero_snr}
    return DdpmObjective(config, SPACE, DdpmSection(**settings))


def flow_objective(**settings: Any) -> FlowObjective:
    return FlowObjective({}, SPACE, FlowSection(**settings), 2)


def batch(rows: int, side: int = 4) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return {
        "latent_mean": torch.randn(rows, 2, side, side, generator=rng),
        "latent_std": torch.rand(rows, 2, side, side, generator=rng),
    }


def weights(prediction: str = "epsilon", **settings: Any) -> Tensor:
    levels = ddpm_objective().schedule.levels(ALL_T)
    return level_weight(*levels, DdpmSection(**settings), prediction)


def snr() -> Tensor:
    alphas = ddpm_objective().schedule.alphas_cumprod_T.double()
    return alphas / (1 - alphas)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 4.0])
def test_soft_min_snr_is_the_formula(gamma: float) -> None:
    """arXiv 2401.11605: 1 / (sigma**2 + 1 / gamma) for predicted images, with sigma**2 = 1 / SNR."""
    of_image = 1 / (1 / snr() + 1 / gamma)
    same(weights(soft_min_snr_gamma=gamma), of_image / snr())
    same(weights("v_prediction", soft_min_snr_gamma=gamma), of_image / (snr() + 1))


def test_weights_are_those_of_sd_scripts() -> None:
    """kohya-ss/sd-scripts library/custom_train_functions.py: apply_debiased_estimation, get_snr_scale,
    scale_v_prediction_loss_like_noise_prediction and add_v_prediction_like_loss."""
    limited = snr().clamp(max=1000)
    scale = limited / (limited + 1)
    assert (snr() > 1000).any(), "the limit counts"
    same(weights(debiased_estimation_loss=True), 1 / limited.sqrt())
    same(weights("v_prediction", debiased_estimation_loss=True), 1 / (limited + 1))
    same(weights("v_prediction", scale_v_pred_loss_like_noise_pred=True), scale)
    same(weights(v_pred_like_loss=0.5), 1 + 0.5 / scale)
    together = weights(v_pred_like_loss=0.5, debiased_estimation_loss=True, min_snr_gamma=5.0)
    same(together, weights(min_snr_gamma=5.0) * (1 + 0.5 / scale) / limited.sqrt())


def test_without_a_weighting_all_levels_weigh_alike() -> None:
    assert weights().eq(1).all() and weights("v_prediction").eq(1).all()
    assert torch.isfinite(weights("v_prediction", soft_min_snr_gamma=4.0)).all()


@pytest.mark.parametrize(
    ("settings", "prediction", "zero_snr", "words"),
    [
        ({"scale_v_pred_loss_like_noise_pred": True}, "epsilon", False, worded("families/is-for-velocity-predictions")),
        ({"v_pred_like_loss": 0.5}, "v_prediction", False, worded("families/is-for-noise-predictions")),
        ({"debiased_estimation_loss": True}, "epsilon", True, worded("families/which-is-0-at-the-end")),
        ({"v_pred_like_loss": 0.5}, "epsilon", True, worded("families/which-is-0-at-the-end")),
    ],
)
def test_a_weighting_that_means_nothing_for_the_base_is_refused(
    settings: dict[str, Any], prediction: str, zero_snr: bool, words: Worded
) -> None:
    config = {"prediction_type": prediction, "rescale_betas_zero_snr": zero_snr}
    with pytest.raises(ModelError, check=saying(words)) as caught:
        check_weighting(DdpmSection(**settings), config)
    assert caught.value.where == f"objective.{next(iter(settings))}" and caught.value.fix
    other = {"epsilon": "v_prediction", "v_prediction": "epsilon"}[prediction]
    fits = {"rescale_betas_zero_snr": False} if zero_snr else {"prediction_type": other}
    check_weighting(DdpmSection(**settings), {**config, **fits})
    check_weighting(DdpmSection(), config)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_huber_thresholds_are_those_of_sd_scripts(schedule: str) -> None:
    """kohya-ss/sd-scripts library/train_util.py: get_huber_threshold_if_needed."""
    least, factor = 0.2, 1.0 if schedule == "snr" else 3.0
    section = DdpmSection(loss_type="huber", huber_schedule=schedule, huber_c=least, huber_scale=factor)
    found = huber_threshold(section, Levels(*ddpm_objective().schedule.levels(ALL_T), ALL_T / 1000))
    expected = {
        "constant": torch.full((1000,), least * factor),
        "exponential": torch.exp(math.log(least) / 1000 * ALL_T.double()) * factor,
        "snr": (1 - least) / (1 + snr() ** -0.5) ** 2 + least,
    }[schedule]
    same(found, expected)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_huber_thresholds_of_flows_have_sigma_for_the_timestep(schedule: str) -> None:
    """The ratio of signal and noise is (1 - sigma) / sigma."""
    factor = {} if schedule == "snr" else {"huber_scale": 3.0}
    objective = flow_objective(loss_type="huber", huber_schedule=schedule, huber_c=0.2, **factor)
    draws = objective.draw(batch(1), range(50)).tensors
    sigma = draws["sigma"].double()
    expected = {
        "constant": torch.full_like(sigma, 0.6),
        "exponential": torch.exp(math.log(0.2) * sigma) * 3,
        "snr": 0.8 * (1 - sigma).square() + 0.2,
    }[schedule]
    same(draws["huber_threshold"], expected)


@pytest.mark.parametrize("loss_type", ["l2", "l1", "huber", "smooth_l1"])
@pytest.mark.parametrize("make", [ddpm_objective, flow_objective])
def test_distances_are_those_of_sd_scripts(loss_type: str, make: Any) -> None:
    """kohya-ss/sd-scripts library/train_util.py: conditional_loss."""
    objective = make(loss_type=loss_type)
    draws = objective.draw(batch(3), [5, 6, 7]).tensors
    noisy, target = objective.noised(batch(3), draws)
    found_B = reduced(objective.prediction(noisy, target, draws))
    error = (noisy - target).double()
    if loss_type in ("l2", "l1"):
        assert "huber_threshold" not in draws
        expected = error.square() if loss_type == "l2" else error.abs()
    else:
        c = draws["huber_threshold"].double()[:, None, None, None]
        expected = 2 * ((error.square() + c.square()).sqrt() - c) * (c if loss_type == "huber" else 1)
    same(found_B, expected.mean(dim=(1, 2, 3)))


def test_small_errors_keep_their_digits_and_gradients_are_finite() -> None:
    objective = flow_objective(loss_type="huber")
    error = torch.full((1, 2, 2, 2), 1e-6, requires_grad=True)
    sample = objective.prediction(error, torch.zeros(1, 2, 2, 2), {"huber_threshold": torch.ones(1)})
    loss_B = reduced(sample)
    same(loss_B, torch.tensor([1e-12]))
    loss_B.sum().backward()
    assert error.grad is not None and error.grad.sum() > 0


@pytest.mark.parametrize("loss_type", ["l1", "huber", "smooth_l1"])
def test_another_loss_type_changes_the_loss_and_nothing_that_is_drawn(loss_type: str) -> None:
    plain, other = (flow_objective(**how) for how in ({}, {"loss_type": loss_type}))
    draws, more = (each.draw(batch(2), [1, 2]).tensors for each in (plain, other))
    assert all(torch.equal(draws[name], more[name]) for name in draws)
    noisy, target = plain.noised(batch(2), draws)
    assert not torch.allclose(*(reduced(each.prediction(noisy, target, more)) for each in (plain, other)))


def test_timesteps_keep_to_their_range() -> None:
    """kohya-ss/sd-scripts library/train_util.py: get_timesteps; the highest one is not drawn."""
    found = ddpm_objective(min_timestep=200, max_timestep=210).draw(batch(1), range(400)).tensors["timesteps"]
    assert set(found.tolist()) == set(range(200, 210))
    logit = {"timestep_sampling": "logit-normal", "logit_std": 3.0}
    found = ddpm_objective(min_timestep=200, max_timestep=210, **logit).draw(batch(1), range(400)).tensors["timesteps"]
    assert set(found.tolist()) == set(range(200, 210)) and found.dtype == torch.int64
    drawn = torch.cat([torch.randint(1000, (1,), generator=torch.Generator().manual_seed(n)) for n in range(9)])
    assert torch.equal(ddpm_objective().draw(batch(1), range(9)).tensors["timesteps"], drawn), "nothing else by default"


def test_a_range_of_noise_levels_is_that_of_musubi_tuner() -> None:
    """kohya-ss/musubi-tuner hv_train_network.py: get_noisy_model_input_and_timesteps, after the shift."""
    how = {"timestep_sampling": "uniform", "shift": 3.0}
    plain = flow_objective(**{**how, "shift": 1.0}).draw(batch(1), range(300)).tensors["sigma"]
    found = flow_objective(**how, min_timestep=250, max_timestep=500).draw(batch(1), range(300)).tensors["sigma"]
    same(found, shifted(plain, 3.0).double() * 0.25 + 0.25)
    assert found.min() >= 0.25 and found.max() < 0.5


def test_a_bias_of_the_timesteps() -> None:
    """Nerogar/OneTrainer ModelSetupNoiseMixin._get_timestep_discrete, LOGIT_NORMAL: bias, and scale of the weight."""
    how = {"timestep_sampling": "logit-normal", "logit_mean": 0.7, "logit_std": 1.5}
    found = ddpm_objective(**how).draw(batch(1), range(50)).tensors["timesteps"]
    normal = torch.stack([torch.randn((), generator=torch.Generator().manual_seed(n)) for n in range(50)])
    wanted = torch.sigmoid(0.7 + 1.5 * normal) * 1000
    assert (found - (wanted - 0.5)).abs().max() < 0.501, "rounded down, but for the last bits"


@pytest.mark.parametrize("make", [ddpm_objective, flow_objective])
def test_a_held_out_loss_keeps_its_place_in_the_schedule(make: Any) -> None:
    wide, narrow = (make(**how).fixed_draw(batch(2), [1, 2], 0.75).tensors for how in ({}, {"max_timestep": 100}))
    assert all(torch.equal(wide[name], narrow[name]) for name in wide)


def test_ddpm_without_options_draws_what_it_always_drew() -> None:
    draws = ddpm_objective().draw(batch(1), [3]).tensors
    rng = torch.Generator().manual_seed(3)
    assert torch.equal(draws["timesteps"], torch.randint(1000, (1,), generator=rng))
    assert torch.equal(draws["posterior"][0], torch.randn(2, 4, 4, generator=rng))
    assert torch.equal(draws["noise"][0], torch.randn(2, 4, 4, generator=rng))
