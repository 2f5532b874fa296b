"""Learning-rate schedules as pure functions of the number of updates, so that a resume is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from lora_rocm.recipe.optim_sections import OptimSection

Shape = Callable[[float, OptimSection], float]
"""Function of (progress, section) that returns the factor of the learning rate, from 1 down to 0.

The progress is between 0 and 1; a cosine also accepts values above 1.
"""

SHAPES: Mapping[str, Shape] = {
    "constant": lambda progress, optim: 1.0,
    "linear": lambda progress, optim: 1.0 - progress,
    "cosine": lambda progress, optim: _cosine(progress),
    "cosine_with_restarts": lambda progress, optim: _restarts(progress, optim.lr_scheduler_num_cycles),
    "polynomial": lambda progress, optim: (1.0 - progress) ** optim.lr_scheduler_power,
    # Chen et al., REX: Revisiting Budgeted Training with an Improved Schedule, arXiv 2107.04197, section 4
    "rex": lambda progress, optim: (1.0 - progress) / (1.0 - progress / 2.0),
}
"""The schedules, keyed by ``optim.lr_scheduler``."""
MAX_COMPARED = 1000
"""Maximum number of updates at which ``length_text`` compares two schedules."""


def learning_rate_factor(optim: OptimSection, updates: int, max_train_steps: int) -> float:
    """Return the factor (0 to 1) of the peak learning rate for the update that follows ``updates`` updates."""
    warmup = optim.warmup_steps(max_train_steps)
    if updates < warmup:
        return updates / warmup if optim.lr_warmup_from_zero else (updates + 1) / (warmup + 1)
    progress = min(1.0, (updates - warmup) / max(1, max_train_steps - warmup))
    if optim.lr_cosine_steps is not None:
        progress = (updates - warmup) / optim.lr_cosine_steps  # half a wave
    lowest = optim.lr_min_ratio
    return lowest + (1.0 - lowest) * SHAPES[optim.lr_scheduler](progress, optim)


def length_text(optim: OptimSection, updates: int, before: int, after: int) -> str:
    """Return a notice if a new length of the run changes the learning rates from ``updates`` on; otherwise "".

    ``before``, ``after``: old and new length of the run in updates.
    """
    rest = range(updates, after, -(-max(1, after - updates) // MAX_COMPARED))
    if all(learning_rate_factor(optim, n, before) == learning_rate_factor(optim, n, after) for n in rest):
        return ""
    return f"The learning-rate schedule ({optim.lr_scheduler}) now ends at step {after} instead of {before}."


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _restarts(progress: float, cycles: int) -> float:
    return _cosine((cycles * progress) % 1.0) if progress < 1.0 else 0.0
