"""Compares a rule with the published update, on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.optim.factory import make_optimizer
from lora_rocm.recipe.optim_sections import OptimSection
from tests.optim.test_base import FREE

SHAPES: tuple[tuple[int, ...], ...] = ((8, 12), (16, 4), (7,), (12, 8), (8, 12))


class Stepper(Protocol):
    def step(self) -> Any: ...


def optimizer_of(section: OptimSection, weights: Sequence[Tensor]) -> GatedOptimizer:
    """Our optimizer over copies of these weights."""
    leaves = {str(number): nn.Parameter(weight.clone()) for number, weight in enumerate(weights)}
    groups = [{"names": list(leaves), "lr": section.learning_rate}]
    how: dict[str, Any] = {"max_train_steps": 100, "ema_decay": 0.0, "use_loss_scale": False}
    return make_optimizer(FlatWeights(leaves), groups, section, **how)


def followed(
    section: OptimSection,
    published: Callable[[list[nn.Parameter]], Stepper],
    steps: int = 6,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> tuple[GatedOptimizer, list[nn.Parameter], Stepper]:
    """Our optimizer, the weights of the published one and itself after ``steps`` updates with equal gradients."""
    generator = torch.Generator().manual_seed(3)
    start = [0.3 * torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = optimizer_of(section, start), [nn.Parameter(weight.clone()) for weight in start]
    reference = published(theirs)
    for number in range(steps):
        for leaf, parameter in zip(ours.weights.leaves.values(), theirs, strict=True):
            leaf.grad = (0.5 + torch.randn(leaf.shape, generator=generator)) * (number + 1)
            parameter.grad = leaf.grad.clone()
        ours.weights.gather()
        ours.step(number, FREE)
        with torch.no_grad():
            reference.step()
    assert all(not torch.allclose(before, after, rtol=1e-3) for before, after in zip(start, theirs, strict=True))
    return ours, theirs, reference


def assert_follows(
    section: OptimSection, published: Callable[[list[nn.Parameter]], Stepper], **how: Any
) -> GatedOptimizer:
    """Equal to rounding: relative to the greatest weight of each tensor."""
    ours, theirs, _ = followed(section, published, **how)
    for weight, expected in zip(ours.parameters.values(), [each.detach() for each in theirs], strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    return ours
