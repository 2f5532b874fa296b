"""D-Adaptation for Adam as its authors' package computes it."""

from __future__ import annotations

from typing import Any

import pytest
from dadaptation import DAdaptAdam

from lora_rocm.recipe.optim_sections import DAdaptAdamSection
from tests.optim.published import assert_follows


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"growth_rate": 1.02},
        {"use_bias_correction": True},
        {"betas": (0.8, 0.99), "epsilon": 1e-2},
    ],
    ids=str,
)
def test_updates_and_estimate_are_those_of_the_package(how: dict[str, Any]) -> None:
    theirs = {"eps" if name == "epsilon" else name: value for name, value in how.items()}
    ours, _, reference = assert_follows(
        DAdaptAdamSection(d0=1e-3, weight_decay=0.1, max_grad_norm=0, **how),
        lambda weights: DAdaptAdam(weights, d0=1e-3, weight_decay=0.1, decouple=True, **theirs),
        {"weight_decay": 0.0, "d0": 1.1e-3, "betas": (0.5, 0.999), "epsilon": 0.1, "growth_rate": 1.01},
        steps=20,
    )
    assert isinstance(reference, DAdaptAdam)
    estimate = reference.param_groups[0]["d"]
    assert float(ours.state()["d"]) == pytest.approx(estimate, rel=1e-5) and estimate > 1.05e-3
