"""Options of the noise against the formulas of the trainers that they come from, and against their own absence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.families.objectives.base import generators, normal
from lora_rocm.families.objectives.denoising import adaptive_strength, offset_noise, pyramid_noise
from tests.families.objectives.test_denoising import SPACE, batch, ddpm_objective, flow_objective, same

OPTIONS: list[dict[str, Any]] = [
    {"noise_offset": 0.1},
    {"noise_offset": 0.1, "adaptive_noise_scale": 0.5},
    {"multires_noise_iterations": 6, "multires_noise_discount": 0.4},
    {"ip_noise_gamma": 0.2},
    {"noise_offset": 0.1, "multires_noise_iterations": 6, "ip_noise_gamma": 0.2},
]
MAKERS = [ddpm_objective, flow_objective]


def drawn(make: Any, rows: int = 1, seed: int = 3, **settings: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = make(**settings).draw(batch(rows, 16), range(seed, seed + rows)).tensors
    return tensors


def test_offset_noise_shifts_whole_channels() -> None:
    noise = torch.randn(2, 4, 8, 8)
    shifted = offset_noise(noise, generators([1, 2]), 0.1) - noise
    assert torch.allclose(shifted, shifted[:, :, :1, :1].expand_as(shifted), atol=1e-6)
    assert len(shifted[:, :, 0, 0].unique()) == 8
    assert offset_noise(noise, generators([1, 2]), 0.0) is noise


def test_noise_of_any_number_of_dimensions() -> None:
    """A video of one frame has the noise of its image."""
    noise = torch.randn(2, 4, 8, 8)
    for change in (
        lambda noise, rngs: offset_noise(noise, rngs, 0.1),
        lambda noise, rngs: pyramid_noise(noise, rngs, 4, 0.5),
    ):
        image, video = (change(each, generators([1, 2])) for each in (noise, noise[:, :, None]))
        assert torch.equal(video[:, :, 0], image) and not torch.equal(image, noise)


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_the_adaptive_offset_is_that_of_sd_scripts(scale: float) -> None:
    """kohya-ss/sd-scripts library/custom_train_functions.py: apply_noise_offset."""
    draws, data = drawn(ddpm_objective, noise_offset=0.1, adaptive_noise_scale=scale), batch(1, 16)
    plain, fixed = drawn(ddpm_objective), drawn(ddpm_objective, noise_offset=0.1)
    latents = SPACE.sample(data, draws).double()
    strength = (0.1 + scale * latents.mean(dim=(2, 3), keepdim=True).abs()).clamp(min=0)
    offset = (fixed["noise"] - plain["noise"]).double() / 0.1
    torch.testing.assert_close(draws["noise"].double(), plain["noise"] + strength * offset, rtol=1e-5, atol=1e-5)
    assert strength.min() == 0 or scale > 0
    same(adaptive_strength(latents.float(), 0.1, scale), strength)


def test_pyramid_noise_is_that_of_sd_scripts() -> None:
    """kohya-ss/sd-scripts library/custom_train_functions.py: pyramid_noise_like, for a batch of one sample."""
    noise, rng = torch.randn(1, 4, 24, 40, generator=torch.Generator().manual_seed(1)), torch.Generator().manual_seed(9)
    expected, levels = noise.double(), 0
    for level in range(6):
        ratio = torch.rand(1, generator=rng).item() * 2 + 2
        rows, columns = max(1, int(24 / ratio**level)), max(1, int(40 / ratio**level))
        enlarge = torch.nn.Upsample(size=(24, 40), mode="bilinear")
        expected = expected + enlarge(torch.randn(4, rows, columns, generator=rng)[None]).double() * 0.4**level
        levels += 1
        if rows == 1 or columns == 1:
            break
    found = pyramid_noise(noise, generators([9]), 6, 0.4)
    assert 2 < levels <= 6
    torch.testing.assert_close(found.double(), expected / expected.std(), rtol=1e-6, atol=1e-6)
    assert found.std().item() == pytest.approx(1, abs=1e-5)
    strong = pyramid_noise(noise, generators([9]), 6, 0.9)
    smooth, plain = (each.reshape(4, 3, 8, 5, 8).mean(dim=(2, 4)).std() for each in (strong, noise))
    assert smooth > 2 * plain, "low frequencies are stronger"


@pytest.mark.parametrize("make", MAKERS)
def test_pyramid_noise_has_the_iterations_and_the_discount_of_the_recipe(make: Any) -> None:
    objective = make(multires_noise_iterations=3, multires_noise_discount=0.7)
    found, rngs = objective.noise_draws(batch(1, 16), {}, generators([9]))["noise"], generators([9])
    assert torch.equal(found, pyramid_noise(normal(rngs, (2, 16, 16)), rngs, 3, 0.7))


@pytest.mark.parametrize("make", MAKERS)
def test_input_perturbation_is_that_of_sd_scripts(make: Any) -> None:
    """kohya-ss/sd-scripts library/train_util.py: get_noise_noisy_latents_and_timesteps, and flux_train_utils.py."""
    plain, other = make(), make(ip_noise_gamma=0.2)
    draws, more = drawn(make), drawn(make, ip_noise_gamma=0.2)
    noisy, target = plain.noised(batch(1, 16), draws)
    perturbed, same_target = other.noised(batch(1, 16), more)
    assert torch.equal(target, same_target), "the target has the plain noise"
    level = draws["noise_level"] if "noise_level" in draws else draws["sigma"]
    extra = (more["input_noise"] - more["noise"]) / 0.2
    torch.testing.assert_close(perturbed - noisy, level[:, None, None, None] * 0.2 * extra, rtol=1e-4, atol=1e-5)
    assert extra.std().item() == pytest.approx(1, abs=0.1) and not torch.allclose(extra, draws["noise"], atol=0.5)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_each_option_changes_the_input_of_the_model_and_nothing_else(make: Any, settings: dict[str, Any]) -> None:
    plain, other = drawn(make), drawn(make, **settings)
    assert not torch.equal(make().noised(batch(1, 16), plain)[0], make().noised(batch(1, 16), other)[0])
    assert all(torch.equal(plain[name], other[name]) for name in plain if name != "noise")


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_noise_depends_on_the_sample_alone(make: Any, settings: dict[str, Any]) -> None:
    objective, data = make(**settings), batch(3, 16)
    together = objective.draw(data, [4, 5, 6]).tensors
    alone = [objective.draw({name: t[n : n + 1] for name, t in data.items()}, [4 + n]).tensors for n in range(3)]
    for name, tensor in together.items():
        assert torch.equal(tensor, torch.cat([each[name] for each in alone])), name


@pytest.mark.parametrize("make", MAKERS)
def test_neutral_values_change_no_bit(make: Any) -> None:
    neutral = {"noise_offset": 0.0, "adaptive_noise_scale": 0.0, "multires_noise_iterations": 0, "ip_noise_gamma": 0.0}
    plain, other = drawn(make), drawn(make, **neutral)
    assert plain.keys() == other.keys() and all(torch.equal(plain[name], other[name]) for name in plain)
