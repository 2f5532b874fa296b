"""Prodigy as its authors' package computes it, and one estimate for groups of different rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from prodigyopt import Prodigy as Published
from torch import Tensor, nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import SCALARS, GatedOptimizer
from lora_rocm.recipe.optim_sections import ProdigySection
from tests.optim.test_base import BLOCKED, FREE, as_bytes

STEPS = 60
SHAPE = (8, 9)  # not a multiple of the alignment: there is room between the weights
VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_bias_correction": True, "weight_decay": 0.1},
    {"safeguard_warmup": True, "lr_warmup_steps": 20, "d_coef": 0.5},
    {"betas": (0.5, 0.99), "beta3": 0.9, "d0": 1e-4, "learning_rate": 0.5, "lr_scheduler": "cosine"},
]


def start_weights(second_is_zero: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = {name: 0.1 * torch.randn(SHAPE, generator=generator) for name in "ab"}
    if second_is_zero:
        weights["b"].zero_()
    return weights


def gradient_of(weight: Tensor, number: int, share: float = 0.1) -> Tensor:
    """Of the squared distance from 1, with a share of noise; float64."""
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
    return weight.detach().double() - 1 + share * noise.double()


def make(
    section: ProdigySection, multiple: float = 1.0, weight_dtype: torch.dtype = torch.float32, **how: Any
) -> GatedOptimizer:
    parameters = {
        name: nn.Parameter(weight) for name, weight in start_weights(how.pop("second_is_zero", False)).items()
    }
    rates = {"a": section.learning_rate, "b": section.learning_rate * multiple}
    groups = [{"names": [name], "lr": rate} for name, rate in rates.items()]
    more = {"max_train_steps": STEPS, "ema_decay": 0.0, "use_loss_scale": False} | how
    leaf_dtype = more.pop("leaf_dtype", torch.float32)
    return GatedOptimizer(FlatWeights(parameters, leaf_dtype, weight_dtype), groups, section, **more)


def one_step(
    optimizer: GatedOptimizer, number: int, gradients: dict[str, Tensor] | None = None, verdict: Tensor = FREE
) -> None:
    if gradients is None:
        gradients = {name: gradient_of(weight, number) for name, weight in optimizer.parameters.items()}
    for name, leaf in optimizer.weights.leaves.items():
        leaf.grad = (gradients[name] * optimizer.loss_scale).to(leaf.dtype)
    optimizer.weights.gather()
    optimizer.step(number, verdict)


class Plain:
    """The algorithm in plain float64 for one list of weights; ``divided``: weights are divided by these."""

    def __init__(self, section: ProdigySection, weights: dict[str, Tensor], divided: dict[str, float]) -> None:
        self.section, self.divided = section, divided
        self.x = {name: weight.double() / divided[name] for name, weight in weights.items()}
        self.x0 = dict(self.x)
        self.m, self.v, self.s = ({name: torch.zeros_like(x) for name, x in self.x.items()} for _ in range(3))
        self.d, self.r, self.k = section.d0, 0.0, 0

    def step(self, factor: float, gradients: dict[str, Tensor]) -> None:
        its, d = self.section, self.d
        (beta1, beta2), beta3 = its.betas, its.beta3 or math.sqrt(its.betas[1])
        self.k += 1
        rate = d * its.learning_rate * factor
        if its.use_bias_correction:
            rate *= math.sqrt(1 - beta2**self.k) / (1 - beta1**self.k)
        grads = {name: gradient.double() * self.divided[name] for name, gradient in gradients.items()}
        self.r *= beta3
        for name, g in grads.items():
            self.r += float((g * (self.x0[name] - self.x[name])).sum()) * rate * d / its.d0
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * d * g
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * (d * g) ** 2
            self.s[name] = beta3 * self.s[name] + d / its.d0 * (d if its.safeguard_warmup else rate) * g
        norm = float(sum(s.abs().sum() for s in self.s.values()))
        self.d = max(d, its.d_coef * self.r / norm) if norm else d
        for name, x in self.x.items():
            decayed = x - rate * self.divided[name] * its.weight_decay * x
            self.x[name] = decayed - rate * self.m[name] / (self.v[name].sqrt() + self.d * its.epsilon)


@pytest.mark.parametrize("variant", [*VARIANTS, {"epsilon": 0.3}], ids=str)
def test_updates_equal_those_of_the_published_package(
    variant: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    section = ProdigySection(max_grad_norm=0, **variant)
    ours, weights = make(section), {name: nn.Parameter(weight) for name, weight in start_weights().items()}
    theirs = Published(
        weights.values(), lr=section.learning_rate, betas=section.betas, beta3=section.beta3, eps=section.epsilon,
        weight_decay=section.weight_decay, use_bias_correction=section.use_bias_correction, d0=section.d0,
        safeguard_warmup=section.safeguard_warmup, d_coef=section.d_coef,
    )  # fmt: skip
    capsys.readouterr()  # it prints
    for number in range(STEPS):
        gradients = {name: gradient_of(weight, number) for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name].float()
        theirs.param_groups[0]["lr"] = ours.learning_rate(number)
        theirs.step()
        one_step(ours, number, gradients)
        # float32: from a weight of 0.1 a move of 1e-6 is known to one part in a hundred
        torch.testing.assert_close(float(ours.rule.logged["prodigy_d"]), theirs.param_groups[0]["d"], rtol=5e-3, atol=0)
    assert theirs.param_groups[0]["d"] > 100 * section.d0
    for name, weight in weights.items():
        torch.testing.assert_close(ours.parameters[name], weight.detach(), rtol=5e-3, atol=5e-3)


def beside_plain(variant: dict[str, Any], multiple: float, divided_by: float) -> list[float]:
    """Ratios of the estimate to plain Prodigy's estimate over weights, the second of which is divided."""
    section = ProdigySection(max_grad_norm=0, **variant)
    ours, divided, ratios = make(section, multiple), {"a": 1.0, "b": divided_by}, []
    plain = Plain(section, start_weights(), divided)
    for number in range(STEPS):
        shares = {"a": 0.1, "b": 3.0}  # of the second, which is mostly noise, the denominator has more
        gradients = {name: gradient_of(plain.x[name] * divided[name], number, shares[name]) for name in "ab"}
        one_step(ours, number, gradients)
        plain.step(ours.learning_rate(number) / section.learning_rate, gradients)
        ratios.append(float(ours.rule.logged["prodigy_d"]) / plain.d)
    return ratios


@pytest.mark.parametrize("multiple", [1.0, 0.1, 3.0])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_one_estimate_serves_groups_of_different_rates(variant: dict[str, Any], multiple: float) -> None:
    """But for rounding, and for epsilon, which is tiny."""
    assert beside_plain(variant, multiple, multiple) == pytest.approx([1.0] * STEPS, rel=1e-2)


def test_a_multiple_that_counts_in_another_way_is_seen() -> None:
    """Negative control of the test above."""
    assert max(abs(ratio - 1) for ratio in beside_plain({}, 0.1, 1.0)) > 0.1


def test_what_is_logged_is_the_estimate_and_the_rate_of_the_step() -> None:
    optimizer = make(ProdigySection(lr_warmup_steps=1, d0=1e-3))
    gradients = {name: gradient_of(weight, 0) for name, weight in optimizer.parameters.items()}
    one_step(optimizer, 0, gradients)
    logged = optimizer.rule.logged
    assert float(logged["effective_learning_rate"]) == pytest.approx(0.5e-3)  # half of the first estimate
    before = float(logged["prodigy_d"])
    one_step(optimizer, 1, gradients)
    assert float(logged["prodigy_d"]) > before
    assert float(logged["effective_learning_rate"]) == pytest.approx(before)


def test_between_the_weights_all_stays_zero_also_where_products_underflow() -> None:
    optimizer = make(ProdigySection(d0=1e-30, epsilon=1e-30))
    for number in range(3):
        one_step(optimizer, number)
    covered_N = torch.zeros_like(optimizer.weights.masters)
    for view in optimizer.weights.views(covered_N).values():
        view.fill_(1)
    for flat_N in (optimizer.weights.masters, *optimizer.rule.buffers.values()):
        assert flat_N.isfinite().all() and flat_N[covered_N == 0].count_nonzero() == 0
    assert (covered_N == 0).any()


def test_without_a_gradient_nothing_moves() -> None:
    optimizer = make(ProdigySection(weight_decay=0))
    before = optimizer.weights.masters.clone()
    one_step(optimizer, 0, {name: torch.zeros(SHAPE) for name in "ab"})
    assert torch.equal(optimizer.weights.masters, before) and float(
        optimizer.rule.logged["prodigy_d"]
    ) == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16,) * 2]
)
def test_it_learns_in_the_formats_of_training(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """From a LoRA's start, where one factor is zero: bf16 weights begin to move there."""
    leaf_dtype, weight_dtype = dtypes
    how = {"leaf_dtype": leaf_dtype, "use_loss_scale": leaf_dtype is torch.float16, "ema_decay": 0.9}
    optimizer = make(ProdigySection(), weight_dtype=weight_dtype, second_is_zero=True, **how)
    if optimizer.use_loss_scale:
        optimizer.loss_scale.fill_(64.0)
    target = {name: (weight.float() - 1).square().mean() for name, weight in optimizer.parameters.items()}
    for number in range(STEPS):
        one_step(optimizer, number)
        assert float(optimizer.state_guard.check()) == 0
    now = {name: (weight.float() - 1).square().mean() for name, weight in optimizer.parameters.items()}
    assert float(optimizer.rule.logged["prodigy_d"]) > 1e-3 and now["b"] < 0.1 * target["b"]
    assert all(average.isfinite().all() for average in optimizer.ema.values())


@pytest.mark.parametrize("leaf_dtype", [torch.float32, torch.bfloat16])
def test_every_part_of_its_state_is_guarded(leaf_dtype: torch.dtype) -> None:
    optimizer = make(ProdigySection(), leaf_dtype=leaf_dtype, ema_decay=0.9)
    state = optimizer.state()
    parts = {f"b.{name}": name for name in optimizer.rule.buffers} | dict.fromkeys(
        ("d", "d_numerator", "step"), SCALARS
    )
    for number, (name, part) in enumerate(parts.items()):
        one_step(optimizer, number)
        assert float(optimizer.state_guard.check()) == 0
        as_bytes(state[name])[0] ^= 1
        assert float(optimizer.state_guard.check()) == 1
        failure = optimizer.state_guard.failure(number)
        assert failure is not None and failure.where.endswith(f": {part}")
        before = optimizer.weights.masters.clone()
        one_step(optimizer, number, verdict=BLOCKED)
        assert torch.equal(before, optimizer.weights.masters)
        as_bytes(state[name])[0] ^= 1
        optimizer.state_guard.reset()


def test_the_metadata_name_the_published_class() -> None:
    said = ProdigySection(d_coef=2).description
    assert said.startswith("prodigyopt.prodigy.Prodigy(decouple=True,weight_decay=0.01,") and "d_coef=2" in said
