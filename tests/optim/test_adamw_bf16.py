"""AdamW over bf16 weights: small updates are not lost, and are AdamW's."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.adamw_bf16 import round_by_chance
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import AdamwBf16Section, AdamwSection, OptimSection
from tests.optim.published import assert_follows
from tests.optim.test_base import FREE

STEPS = 100


def test_float32_weights_are_moved_as_by_adamw() -> None:
    section = AdamwBf16Section(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0)
    assert_follows(
        section,
        lambda weights: torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1),
        {"betas": (0.5, 0.999), "epsilon": 0.1},
    )


def walked(section: OptimSection) -> GatedOptimizer:
    """The optimizer of weights of 1 after steps of 1e-4 in one direction."""
    leaf = nn.Parameter(torch.ones(32, 32))
    weights = FlatWeights({"a": leaf}, torch.bfloat16, torch.bfloat16)
    groups = [{"names": ["a"], "lr": section.learning_rate}]
    optimizer: GatedOptimizer = GatedOptimizer(
        weights, groups, section, max_train_steps=STEPS, ema_decay=0, use_loss_scale=False
    )
    for number in range(STEPS):
        leaf.grad = torch.ones_like(leaf)
        weights.gather()
        optimizer.step(number, FREE)
    return optimizer


def way(section: OptimSection) -> float:
    """The average distance that weights move, as a share of the whole distance."""
    return float((1 - walked(section).weights.masters.float()).mean()) / (STEPS * section.learning_rate)


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_small_steps_add_up(rounding: Literal["stochastic", "kahan"]) -> None:
    assert way(AdamwBf16Section(rounding=rounding, weight_decay=0.0)) == pytest.approx(1, abs=0.2)
    assert way(AdamwSection(weight_decay=0.0)) == 0, "the control: each step is lost to rounding"


def test_kahans_sum_knows_what_the_weights_lack() -> None:
    """bf16 numbers below 1 are 2**-8 apart, so weights alone are off; random values are not even alike."""
    kahan, chance = (
        walked(AdamwBf16Section(rounding=rounding, weight_decay=0.0)) for rounding in ("kahan", "stochastic")
    )
    weight, end = kahan.parameters["a"].float(), 1 - STEPS * 1e-4
    assert float((weight - end).abs().max()) > 1e-3
    assert float((weight + kahan.state()["a.kahan"].float() - end).abs().max()) < 2e-4
    assert float(chance.parameters["a"].float().std()) > 1e-3 and "a.kahan" not in chance.state()


def test_chance_is_fair_and_the_same_each_time() -> None:
    steps = torch.tensor(7.0)
    for value in (1.0 + 2**-9, -3.0 - 2**-8, 1e-30):
        numbers_N = torch.full((1 << 14,), value)
        rounded_N = round_by_chance(numbers_N.clone(), torch.bfloat16, steps, 2)
        assert torch.equal(rounded_N, rounded_N.bfloat16().float()) and len(rounded_N.unique()) == 2
        assert float(rounded_N.mean()) == pytest.approx(value, rel=2**-8 / 40)
        assert torch.equal(rounded_N, round_by_chance(numbers_N.clone(), torch.bfloat16, steps, 2))
        for other in (
            round_by_chance(numbers_N.clone(), torch.bfloat16, steps + 1, 2),
            round_by_chance(numbers_N.clone(), torch.bfloat16, steps, 1),
        ):
            assert 0.4 < float((other == rounded_N).float().mean()) < 0.9
    exact_N = torch.tensor([0.0, 1.0, -2.5])
    assert torch.equal(round_by_chance(exact_N.clone(), torch.bfloat16, steps, 0), exact_N)
    assert torch.equal(round_by_chance(torch.tensor([0.1]), torch.float32, steps, 0), torch.tensor([0.1]))
