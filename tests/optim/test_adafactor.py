"""Adafactor as transformers computes it, which other trainers use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from lora_rocm.recipe.optim_sections import AdafactorSection
from tests.optim.published import assert_follows, optimizer_of
from tests.optim.test_base import FREE


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"scale_parameter": True, "beta1": 0.9},
        {"scale_parameter": True, "eps": (0.1, 0.5)},
        {"relative_step": True},
        {"relative_step": True, "warmup_init": True, "decay_rate": -0.5},
    ],
    ids=str,
)
def test_updates_are_those_of_transformers(how: dict[str, Any]) -> None:
    rate = {} if "relative_step" in how else {"learning_rate": 1e-2}
    given = {"relative_step": False, "scale_parameter": False, "lr": rate.get("learning_rate"), **how}
    assert_follows(
        AdafactorSection(weight_decay=0.1, max_grad_norm=0, **how, **rate),
        lambda weights: Adafactor(weights, weight_decay=0.1, **given),
        {"decay_rate": -2.0, "clip_threshold": 0.5, **({"eps": (1e-30, 0.5)} if "eps" in how else {})},
        steps=40 if "warmup_init" in how else 6,  # its first steps are very small
    )


def test_the_weights_of_a_convolution_are_matrices_of_their_first_axis() -> None:
    weight = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    section = AdafactorSection(learning_rate=1e-2)
    found = []
    for shape in ((4, 2, 3, 3), (4, 18)):
        optimizer = optimizer_of(section, [weight.view(shape)])
        optimizer.weights.leaves["0"].grad = nn.Parameter(weight.view(shape).cos().clone())
        optimizer.weights.gather()
        optimizer.step(0, FREE)
        found.append(optimizer.parameters["0"].reshape(-1))
    assert torch.equal(*found) and not torch.equal(found[0], weight.reshape(-1))
