"""The gate: a blocked or non-finite update moves nothing; a free one is PyTorch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.recipe.schema import AdamwSection
from lora_rocm.train.optim import LOSS_SCALE_GROWTH_INTERVAL, GatedAdamW, learning_rate_factor

FREE, BLOCKED = torch.tensor(0.0), torch.tensor(1.0)


def make(optim: AdamwSection | None = None, *, ema: float = 0.9, scale: bool = False) -> GatedAdamW:
    generator = torch.Generator().manual_seed(3)
    parameters = {name: nn.Parameter(torch.randn(4, 5, generator=generator)) for name in "ab"}
    groups = [{"names": list(parameters), "lr": 1e-2}]
    how = {"max_train_steps": 10, "ema_decay": ema, "use_loss_scale": scale}
    return GatedAdamW(FlatWeights(parameters), groups, optim or AdamwSection(), **how)


def set_gradients(optimizer: GatedAdamW, seed: int, value: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for leaf in optimizer.weights.leaves.values():
        leaf.grad = torch.randn(leaf.shape, generator=generator) * optimizer.loss_scale
        if value is not None:
            leaf.grad[0, 0] = value
    optimizer.weights.gather()


def everything(optimizer: GatedAdamW) -> dict[str, torch.Tensor]:
    live = {f"live.{name}": p.detach().clone() for name, p in optimizer.parameters.items()}
    ema = {f"ema.{name}": average.clone() for name, average in optimizer.ema.items()}
    return {**live, **ema, **{name: tensor.clone() for name, tensor in optimizer.state().items()}}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@torch.no_grad()
def copy_weights(source: GatedAdamW, target: GatedAdamW) -> None:
    for name, parameter in target.parameters.items():
        parameter.copy_(source.parameters[name])


def test_a_blocked_update_moves_nothing_and_a_free_one_everything() -> None:
    optimizer = make(scale=True)
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    before = everything(optimizer)
    set_gradients(optimizer, 1)
    optimizer.step(1, BLOCKED)
    assert changed(before, everything(optimizer)) == set()
    set_gradients(optimizer, 1)
    optimizer.step(1, FREE)  # negative control
    assert changed(before, everything(optimizer)) == set(before) - {"loss_scale"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_moves_nothing_but_the_scale(value: float) -> None:
    optimizer = make(scale=True)
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    before = everything(optimizer)
    set_gradients(optimizer, 1, value)
    stats = optimizer.step(1, FREE)
    assert float(stats.nonfinite) == 1
    assert changed(before, everything(optimizer)) == {"loss_scale", "growth"}
    assert float(optimizer.loss_scale) == 0.5 * float(before["loss_scale"])


def test_a_blocked_overflow_does_not_touch_the_scale() -> None:
    optimizer = make(scale=True)
    set_gradients(optimizer, 0, float("inf"))
    before = everything(optimizer)
    optimizer.step(0, BLOCKED)
    assert changed(before, everything(optimizer)) == set()


def test_the_scale_doubles_after_a_clean_run() -> None:
    optimizer = make(scale=True)
    optimizer.growth = torch.tensor(LOSS_SCALE_GROWTH_INTERVAL - 1.0)
    before = float(optimizer.loss_scale)
    set_gradients(optimizer, 0)
    optimizer.step(0, FREE)
    assert float(optimizer.loss_scale) == 2 * before and float(optimizer.growth) == 0


def test_updates_equal_plain_adamw_with_clipping() -> None:
    optim = AdamwSection(max_grad_norm=0.5, weight_decay=0.1)
    ours = make(optim)
    reference = {name: nn.Parameter(weight.clone()) for name, weight in ours.parameters.items()}
    plain = torch.optim.AdamW(reference.values(), lr=1e-2, weight_decay=0.1)
    for seed in range(5):
        set_gradients(ours, seed)
        gradients = ours.weights.views(ours.weights.gradients)
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 0.5)
        plain.step()
        stats = ours.step(seed, FREE)
        torch.testing.assert_close(stats.grad_norm, norm)
    for name, parameter in ours.parameters.items():
        torch.testing.assert_close(parameter, reference[name].detach(), rtol=1e-6, atol=1e-7)


def test_loss_scale_does_not_change_the_update() -> None:
    scaled, plain = make(scale=True), make(scale=False)
    for optimizer in (scaled, plain):
        set_gradients(optimizer, 0)
        optimizer.step(0, FREE)
    for name in plain.parameters:
        torch.testing.assert_close(scaled.parameters[name], plain.parameters[name])


def test_state_round_trip_continues_with_the_same_bytes() -> None:
    straight, stopped = make(scale=True), make(scale=True)
    for seed in range(3):
        for optimizer in (straight, stopped):
            set_gradients(optimizer, seed)
            optimizer.step(seed, FREE)
    resumed = make(scale=True)
    copy_weights(stopped, resumed)
    resumed.load(stopped.state(), stopped.ema)
    forgetful = make(scale=True)  # negative control: without the moments the next update differs
    copy_weights(stopped, forgetful)
    for optimizer in (straight, resumed, forgetful):
        set_gradients(optimizer, 3)
        optimizer.step(3, FREE)
    assert changed(everything(straight), everything(resumed)) == set()
    assert "live.a" in changed(everything(straight), everything(forgetful))


def test_schedules() -> None:
    warm = AdamwSection(lr_warmup_steps=4)
    assert [learning_rate_factor(warm, n, 10) for n in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    linear = AdamwSection(lr_scheduler="linear")
    assert [round(learning_rate_factor(linear, n, 4), 6) for n in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = AdamwSection(lr_scheduler="cosine", lr_warmup_steps=2)
    assert [round(learning_rate_factor(cosine, n, 6), 6) for n in (2, 4, 6)] == [1.0, 0.5, 0.0]


def test_the_logged_rate_is_the_recipes_also_when_text_encoders_come_first() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    groups = [{"names": ["p"], "lr": 1e-6}]
    optim = AdamwSection(learning_rate=1e-4, text_encoder_learning_rate=1e-6)
    weights = FlatWeights({"p": parameter})
    optimizer = GatedAdamW(weights, groups, optim, max_train_steps=9, ema_decay=0, use_loss_scale=False)
    assert optimizer.learning_rate(0) == 1e-4
