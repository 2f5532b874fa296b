"""Prodigy and schedule-free Adam as published, without the slices of its package; what users get is the average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lora_rocm.recipe.optim_sections import ProdigyScheduleFreeSection
from tests.optim.published import followed

LIMITED = 2**0.25


class Published:
    """The package's steps with all its additions off, over whole weights; sums in float64."""

    def __init__(self, weights: list[nn.Parameter], limit: float) -> None:
        self.weights, self.limit, self.d, self.numerator, self.total = weights, limit, 1e-3, 0.0, 0.0
        self.state = [[w.detach().clone(), w.detach().clone(), *torch.zeros(2, *w.shape)] for w in weights]

    def step(self) -> None:
        d, beta3, progress, size = self.d, math.sqrt(0.99), 0.0, 0.0
        scale, newest = d**2 / math.sqrt(1e-3), d**2 / (self.total + d**2)
        self.total += d**2
        for y, (start, z, total, second) in zip(self.weights, self.state, strict=True):
            assert y.grad is not None
            progress += scale * float((y.grad.double() * (start - z)).sum())
            total.mul_(beta3).add_(scale * y.grad)
            size += float(total.double().abs().sum())
            second.mul_(0.99).add_(0.01 * (d * y.grad) ** 2)
            update = d * y.grad / (second.sqrt() + d * 1e-8) + 0.1 * y
            y.lerp_(z, newest)
            y.sub_(d * (1 - 0.9 * (1 - newest)) * update)
            z.sub_(d * update)
        self.numerator = beta3 * self.numerator + (progress if d > 1e-3 or progress > 0 else 0.0)
        self.d = max(d, min(d * self.limit, self.numerator / size))


@pytest.mark.parametrize(("how", "limit"), [({}, LIMITED), ({"d_limiter": False}, math.inf)], ids=str)
def test_updates_estimate_and_average_are_those_of_the_package(how: dict[str, Any], limit: float) -> None:
    section = ProdigyScheduleFreeSection(d0=1e-3, weight_decay=0.1, max_grad_norm=0, **how)
    ours, theirs, reference = followed(section, lambda weights: Published(weights, limit), steps=20)
    assert isinstance(reference, Published)
    assert float(ours.state()["d"]) == pytest.approx(reference.d, rel=1e-5) and reference.d > 2e-3
    for trained, shown, y, (_, z, *_) in zip(
        ours.parameters.values(), ours.shown().values(), theirs, reference.state, strict=True
    ):
        near = {"rtol": 1e-5, "atol": 1e-5 * float(z.abs().max())}
        torch.testing.assert_close(trained, y.detach(), **near)
        torch.testing.assert_close(shown, (y.detach() - 0.1 * z) / 0.9, **near)
