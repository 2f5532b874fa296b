"""Prodigy and schedule-free Adam as their package computes it, without its slices; users get the average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from prodigyplus import ProdigyPlusScheduleFree
from torch import Tensor, nn

from lora_rocm.recipe.optim_sections import ProdigyScheduleFreeSection
from tests.optim.published import ROUNDING, assert_follows, deviation

STEPS = 20


class Published(ProdigyPlusScheduleFree):
    """The package with all its additions off; its estimate reads each weight instead of each eleventh."""

    def __init__(self, weights: list[nn.Parameter], **given: Any) -> None:
        off = {"factored": False, "use_stableadamw": False, "stochastic_rounding": False, "split_groups": False}
        super().__init__(weights, d0=1e-3, weight_decay=0.1, **off, **given)

    def get_sliced_tensor(self, tensor: Tensor, slice_p: int = 1) -> Tensor:
        return super().get_sliced_tensor(tensor, slice_p)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"d_limiter": False},
        {"betas": (0.8, 0.95), "beta3": 0.9, "epsilon": 1e-2, "d_coef": 2.0, "d_limiter": False},
    ],
    ids=str,
)
def test_updates_estimate_and_average_are_those_of_the_package(how: dict[str, Any]) -> None:
    given = {"eps" if name == "epsilon" else name: value for name, value in how.items()}
    section = ProdigyScheduleFreeSection(d0=1e-3, weight_decay=0.1, max_grad_norm=0, **how)
    # Of weights in float64 it keeps the start and the sum of the gradients as they are, else in bfloat16.
    of_estimate = (
        {"d_limiter": False} if section.d_limiter else {"beta3": 0.5, "d_coef": 1.5}
    )  # the limit decides alone
    changed = {"weight_decay": 0.0, "betas": (0.5, 0.99), "epsilon": 0.1, "d0": 1.1e-3, **of_estimate}
    ours, theirs, reference = assert_follows(
        section, lambda weights: Published(weights, **given), changed, steps=STEPS, dtype=torch.float64
    )
    assert isinstance(reference, Published)
    estimate = reference.param_groups[0]["d"]
    assert float(ours.state()["d"]) == pytest.approx(estimate, rel=1e-5) and estimate > 2e-3
    assert deviation(ours.shown(), theirs) > 10 * ROUNDING  # they hold what is trained
    reference.eval()
    assert deviation(ours.shown(), theirs) < ROUNDING
