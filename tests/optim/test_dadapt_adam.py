"""D-Adaptation for Adam as its authors' package computes it."""

from __future__ import annotations

from typing import Any

import pytest
from dadaptation import DAdaptAdam
from torch import nn

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import DAdaptAdamSection
from tests.optim.published import ROUNDING, SHAPES, assert_follows, deviation, gradients_of, start_of
from tests.optim.test_base import FREE


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


def test_the_multiple_of_a_group_is_the_layer_scale_of_the_package() -> None:
    start, how = start_of(SHAPES), {"d0": 1e-3, "weight_decay": 0.1}
    leaves, theirs = {str(n): nn.Parameter(w.clone()) for n, w in enumerate(start)}, [*map(nn.Parameter, start)]
    names, given = list(leaves), {"max_train_steps": 100, "ema_decay": 0.0, "use_loss_scale": False}
    section = DAdaptAdamSection.model_validate({"max_grad_norm": 0, **how})
    groups = [{"names": names[:4], "lr": 1.0}, {"names": names[4:], "lr": 0.25}]
    ours = GatedOptimizer(FlatWeights(leaves), groups, section, **given)  # type: ignore[arg-type]
    reference = DAdaptAdam([{"params": theirs[:4]}, {"params": theirs[4:], "layer_scale": 0.25}], decouple=True, **how)
    for number, gradients in enumerate(gradients_of(20, SHAPES)):
        for leaf, parameter, gradient in zip(ours.weights.leaves.values(), theirs, gradients, strict=True):
            leaf.grad, parameter.grad = gradient.clone(), gradient.clone()
        ours.weights.gather()
        ours.step(number, FREE)
        reference.step()
    assert deviation(ours.parameters, theirs) < ROUNDING
    assert float(ours.state()["d"]) == pytest.approx(reference.param_groups[0]["d"], rel=1e-5)
