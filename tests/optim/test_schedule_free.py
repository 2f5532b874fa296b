"""Schedule-free AdamW as its authors' package computes it; users get the average."""

from __future__ import annotations

from typing import Any

import pytest
from schedulefree import AdamWScheduleFree
from torch import nn

from lora_rocm.recipe.optim_sections import ScheduleFreeSection
from tests.optim.published import ROUNDING, assert_follows, deviation

WARMUP = 3


@pytest.mark.parametrize(
    "how", [{}, {"r": 1.5, "weight_lr_power": 1.0}, {"betas": (0.8, 0.99), "epsilon": 1e-2}], ids=str
)
def test_updates_and_average_are_those_of_the_package(how: dict[str, Any]) -> None:
    theirs = {"eps" if name == "epsilon" else name: value for name, value in how.items()}

    def published(weights: list[nn.Parameter]) -> AdamWScheduleFree:
        # Ours counts the first full step in addition to the warm-up.
        made = AdamWScheduleFree(weights, lr=1e-2, weight_decay=0.1, warmup_steps=WARMUP + 1, **theirs)
        made.train()
        return made

    section = ScheduleFreeSection(learning_rate=1e-2, weight_decay=0.1, lr_warmup_steps=WARMUP, max_grad_norm=0, **how)
    changed = {"r": 3.0, "weight_lr_power": 0.0, "betas": (0.5, 0.999), "epsilon": 0.1, "lr_warmup_steps": 0}
    ours, weights, reference = assert_follows(section, published, {"weight_decay": 0.0, **changed})
    assert isinstance(reference, AdamWScheduleFree)
    assert deviation(ours.shown(), weights) > 10 * ROUNDING  # they hold what is trained
    reference.eval()
    assert deviation(ours.shown(), weights) < ROUNDING
