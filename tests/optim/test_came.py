"""CAME as its authors' package computes it."""

from __future__ import annotations

from came_pytorch import CAME

from lora_rocm.recipe.optim_sections import CameSection
from tests.optim.published import assert_follows


def test_updates_are_those_of_the_package() -> None:
    assert_follows(
        CameSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0),
        lambda weights: CAME(weights, lr=1e-2, weight_decay=0.1),
        {"weight_decay": 0.0, "betas": (0.9, 0.99, 0.9999), "clip_threshold": 0.5},
    )
    given = {"betas": (0.8, 0.99, 0.999), "eps": (1e-3, 1e-2), "clip_threshold": 0.5}
    assert_follows(
        CameSection(learning_rate=1e-2, weight_decay=0, max_grad_norm=0, **given),
        lambda weights: CAME(weights, lr=1e-2, **given),
        {"betas": (0.8, 0.99, 0.9), "eps": (1e-3, 1e-16)},
    )
