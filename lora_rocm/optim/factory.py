"""The update rule of each optimizer in a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lora_rocm.optim.adamw import AdamW
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.optim.prodigy import Prodigy
from lora_rocm.optim.update_rule import TrainedWeights, UpdateRule
from lora_rocm.recipe.optim_sections import OptimSection

RULES: Mapping[str, type[UpdateRule]] = {"adamw": AdamW, "prodigy": Prodigy}
"""By ``optim.optimizer``."""


def rule_of(section: OptimSection) -> type[UpdateRule]:
    """The update rule of a recipe's optimizer."""
    return RULES[section.optimizer]


def make_optimizer(
    weights: TrainedWeights,
    groups: Sequence[Mapping[str, Any]],
    section: OptimSection,
    *,
    max_train_steps: int,
    ema_decay: float,
    use_loss_scale: bool,
    triton: bool = False,
) -> GatedOptimizer:
    """Build the recipe's optimizer. The arguments are those of ``GatedOptimizer``."""
    return GatedOptimizer(
        rule_of(section),
        weights,
        groups,
        section,
        max_train_steps=max_train_steps,
        ema_decay=ema_decay,
        use_loss_scale=use_loss_scale,
        triton=triton,
    )
