"""Learning-rate schedules as pure functions of the number of updates, so a resume is exact."""

from __future__ import annotations

import math

from lora_rocm.recipe.schema import OptimSection


def learning_rate_factor(optim: OptimSection, updates: int, max_train_steps: int) -> float:
    """Factor (0 to 1) of the peak learning rate for the update after ``updates`` updates."""
    warmup = optim.lr_warmup_steps
    if updates < warmup:
        return (updates + 1) / (warmup + 1)
    progress = (updates - warmup) / max(1, max_train_steps - warmup)
    if optim.lr_scheduler == "linear":
        return max(0.0, 1.0 - progress)
    if optim.lr_scheduler == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return 1.0
