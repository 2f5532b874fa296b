"""D-Adaptation for Adam as published, and one estimate for groups of different rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lora_rocm.recipe.optim_sections import DAdaptAdamSection
from tests.optim.published import assert_follows


class Published:
    """Algorithm 5 of arXiv 2301.07733 with decoupled weight decay, sums in float64."""

    def __init__(self, weights: list[nn.Parameter], growth: float, correction: bool) -> None:
        self.weights, self.growth, self.correction = weights, growth, correction
        self.state = [[torch.zeros_like(weight) for _ in range(3)] for weight in weights]
        self.d, self.numerator, self.number = 1e-3, 0.0, 0

    def step(self) -> None:
        self.number += 1
        root, rate, progress, size = math.sqrt(0.999), self.d, 0.0, 0.0
        if self.correction:
            rate *= math.sqrt(1 - 0.999**self.number) / (1 - 0.9**self.number)
        for weight, (first, second, total) in zip(self.weights, self.state, strict=True):
            assert weight.grad is not None
            progress += rate * float((weight.grad.double() * total / (second.sqrt() + 1e-8)).sum())
            first.mul_(0.9).add_(0.1 * rate * weight.grad)
            second.mul_(0.999).add_(0.001 * weight.grad**2)
            total.mul_(root).add_((1 - root) * rate * weight.grad)
            size += float(total.double().abs().sum())
        self.numerator = root * self.numerator + (1 - root) * progress
        self.d = max(self.d, min(self.numerator / ((1 - root) * size), self.d * self.growth))
        for weight, (first, second, _) in zip(self.weights, self.state, strict=True):
            weight.sub_(rate * 0.1 * weight + first / (second.sqrt() + 1e-8))


@pytest.mark.parametrize("how", [{}, {"growth_rate": 1.02}, {"use_bias_correction": True}], ids=str)
def test_updates_are_those_of_the_paper(how: dict[str, Any]) -> None:
    references = []

    def published(weights: list[nn.Parameter]) -> Published:
        references.append(Published(weights, how.get("growth_rate", math.inf), how.get("use_bias_correction", False)))
        return references[-1]

    section = DAdaptAdamSection(d0=1e-3, weight_decay=0.1, max_grad_norm=0, **how)
    ours = assert_follows(section, published, steps=20)
    assert float(ours.state()["d"]) == pytest.approx(references[0].d, rel=1e-5) and references[0].d > 1.05e-3
