"""Schedule-free AdamW as published; what users get is the average."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_rocm.recipe.optim_sections import ScheduleFreeSection
from tests.optim.published import followed

WARMUP = 3


class Published:
    """Algorithm 1 of arXiv 2405.15682 with the average x kept; a warm-up, and steps weighted by their rate."""

    def __init__(self, weights: list[nn.Parameter], r: float) -> None:
        self.weights, self.r, self.number, self.total = weights, r, 0, 0.0
        self.average = [weight.detach().clone() for weight in weights]
        self.end = [weight.detach().clone() for weight in weights]
        self.squares = [torch.zeros_like(weight) for weight in weights]

    def step(self) -> None:
        self.number += 1
        rate = 1e-2 * min(1.0, self.number / (WARMUP + 1))
        weight_of_step = self.number**self.r * rate**2
        self.total += weight_of_step
        for y, x, z, squares in zip(self.weights, self.average, self.end, self.squares, strict=True):
            assert y.grad is not None
            squares.mul_(0.999).add_(0.001 * y.grad**2)
            z.sub_(rate * (y.grad / ((squares / (1 - 0.999**self.number)).sqrt() + 1e-8) + 0.1 * y))
            x.lerp_(z, weight_of_step / self.total)
            y.copy_(0.9 * x + 0.1 * z)


@pytest.mark.parametrize("r", [0.0, 1.5])
def test_updates_and_average_are_those_of_the_paper(r: float) -> None:
    section = ScheduleFreeSection(learning_rate=1e-2, weight_decay=0.1, r=r, lr_warmup_steps=WARMUP, max_grad_norm=0)
    ours, theirs, reference = followed(section, lambda weights: Published(weights, r))
    assert isinstance(reference, Published)
    for trained, shown, y, x in zip(
        ours.parameters.values(), ours.shown().values(), theirs, reference.average, strict=True
    ):
        near = {"rtol": 1e-5, "atol": 1e-5 * float(x.abs().max())}
        torch.testing.assert_close(trained, y.detach(), **near)
        torch.testing.assert_close(shown, x, **near)
        assert not torch.allclose(trained, shown, rtol=1e-3)
