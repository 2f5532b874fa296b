"""Lion as published."""

from __future__ import annotations

import torch
from torch import nn

from lora_rocm.recipe.optim_sections import LionSection
from tests.optim.published import assert_follows


class Published:
    """Algorithm 2 of arXiv 2302.06675."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.momenta = [(weight, torch.zeros_like(weight)) for weight in weights]

    def step(self) -> None:
        for weight, momentum in self.momenta:
            assert weight.grad is not None
            sign = torch.sign(0.9 * momentum + 0.1 * weight.grad)
            weight.sub_(1e-2 * (sign + 0.1 * weight))
            momentum.mul_(0.99).add_(0.01 * weight.grad)


def test_updates_are_those_of_the_paper() -> None:
    assert_follows(LionSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0), Published)
