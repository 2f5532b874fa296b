"""CAME as published."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lora_rocm.recipe.optim_sections import CameSection
from tests.optim.published import assert_follows


def spread(rows: Tensor, columns: Tensor) -> Tensor:
    return (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt()[None, :]


class Published:
    """Algorithm 2 of arXiv 2307.02047; vectors as in the authors' code."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.state: dict[int, list[Tensor]] = {}

    def step(self) -> None:
        for number, weight in enumerate(self.weights):
            assert weight.grad is not None
            matrix = weight.ndim == 2
            squares = weight.grad**2 + 1e-30
            means = [squares.mean(1), squares.mean(0)] if matrix else [squares]
            zeros = [torch.zeros_like(weight), *map(torch.zeros_like, [*means, *means])]
            momentum, *rest = self.state.setdefault(number, zeros)
            for state, mean in zip(rest, means, strict=False):
                state.lerp_(mean, 1 - 0.999)
            update = weight.grad * (spread(rest[0], rest[1]) if matrix else rest[0].rsqrt())
            update /= max(1.0, float(update.square().mean().sqrt()))
            momentum.lerp_(update, 1 - 0.9)
            moved = momentum
            if matrix:
                unstable = (update - momentum) ** 2 + 1e-16
                for state, mean in zip(rest[2:], [unstable.mean(1), unstable.mean(0)], strict=True):
                    state.lerp_(mean, 1 - 0.9999)
                moved = momentum * spread(rest[2], rest[3])
            weight.sub_(1e-2 * (moved + 0.1 * weight))


def test_updates_are_those_of_the_paper() -> None:
    assert_follows(CameSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0), Published)
