"""Compares a rule with the optimizer that is published, on the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import OptimSection
from tests.optim.test_base import FREE

SHAPES: tuple[tuple[int, ...], ...] = ((8, 12), (16, 4), (7,), (12, 8), (8, 12), (1, 9), (9, 1), (9,))
ROUNDING = 2e-5
"""Bound of ``deviation`` for the same computation in float32."""


class Stepper(Protocol):
    def step(self) -> Any: ...


def optimizer_of(section: OptimSection, weights: Sequence[Tensor]) -> GatedOptimizer:
    """Our optimizer over copies of these weights."""
    leaves = {str(number): nn.Parameter(weight.clone()) for number, weight in enumerate(weights)}
    groups = [{"names": list(leaves), "lr": section.learning_rate}]
    how: dict[str, Any] = {"max_train_steps": 100, "ema_decay": 0.0, "use_loss_scale": False}
    return GatedOptimizer(FlatWeights(leaves), groups, section, **how)


def start_of(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The weights at the start."""
    generator = torch.Generator().manual_seed(3)
    return [0.3 * torch.randn(shape, generator=generator) for shape in shapes]


def gradients_of(steps: int, shapes: Sequence[tuple[int, ...]]) -> Iterator[list[Tensor]]:
    """The gradients of each update; they grow."""
    generator = torch.Generator().manual_seed(4)
    for number in range(steps):
        yield [(0.5 + torch.randn(shape, generator=generator)) * (number + 1) for shape in shapes]


def trained(section: OptimSection, steps: int, shapes: Sequence[tuple[int, ...]]) -> GatedOptimizer:
    """Our optimizer after ``steps`` updates."""
    optimizer = optimizer_of(section, start_of(shapes))
    for number, gradients in enumerate(gradients_of(steps, shapes)):
        for leaf, gradient in zip(optimizer.weights.leaves.values(), gradients, strict=True):
            leaf.grad = gradient
        optimizer.weights.gather()
        optimizer.step(number, FREE)
    return optimizer


def followed(
    section: OptimSection,
    published: Callable[[list[nn.Parameter]], Stepper],
    steps: int = 6,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> tuple[GatedOptimizer, list[nn.Parameter], Stepper]:
    """Our optimizer, the weights (of ``dtype``) of the published one and itself after updates with equal gradients."""
    start = start_of(shapes)
    theirs = [nn.Parameter(weight.to(dtype, copy=True)) for weight in start]
    reference = published(theirs)
    for gradients in gradients_of(steps, shapes):
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.to(dtype)
        with torch.no_grad():
            reference.step()
    assert all(not torch.allclose(a, b.float(), rtol=1e-3) for a, b in zip(start, theirs, strict=True)), "they move"
    return trained(section, steps, shapes), theirs, reference


def deviation(ours: Mapping[str, Tensor], theirs: Sequence[Tensor]) -> float:
    """The greatest difference between two lists of weights, each relative to the greatest weight of its tensor."""
    pairs = zip(ours.values(), (each.detach() for each in theirs), strict=True)
    return max(float((weight - expected).abs().max() / expected.abs().max()) for weight, expected in pairs)


def assert_follows(
    section: OptimSection,
    published: Callable[[list[nn.Parameter]], Stepper],
    seen: Mapping[str, Any],
    bound: float = ROUNDING,
    steps: int = 6,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **how: Any,
) -> tuple[GatedOptimizer, list[nn.Parameter], Stepper]:
    """The weights equal the published optimizer's weights to within ``bound``. Returns what ``followed`` returns.

    ``seen``: argument -> another value, with which ours are not.
    """
    ours, theirs, reference = followed(section, published, steps, shapes, **how)
    assert deviation(ours.parameters, theirs) < bound
    for name, value in seen.items():
        others = trained(section.model_copy(update={name: value}), steps, shapes)
        assert deviation(others.parameters, theirs) > 5 * bound, f"{name}: {value} makes no difference"
    return ours, theirs, reference
