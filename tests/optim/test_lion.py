"""Lion as the package ``lion-pytorch`` computes it."""

from __future__ import annotations

from lion_pytorch import Lion

from lora_rocm.recipe.optim_sections import LionSection
from tests.optim.published import assert_follows


def test_updates_are_those_of_the_package() -> None:
    assert_follows(
        LionSection(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0),
        lambda weights: Lion(weights, lr=1e-2, weight_decay=0.1),
        {"weight_decay": 0.0, "betas": (0.5, 0.99)},
    )
    assert_follows(
        LionSection(learning_rate=1e-2, betas=(0.95, 0.98), max_grad_norm=0),
        lambda weights: Lion(weights, lr=1e-2, betas=(0.95, 0.98), weight_decay=0.01),
        {"betas": (0.95, 0.5)},
    )
