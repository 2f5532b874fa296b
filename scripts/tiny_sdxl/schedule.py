"""Learning-rate clock and weight averaging, shared by both trainings."""

from __future__ import annotations

import math
import time

import torch


class Clock:
    """Warm-up, then cosine, over steps or seconds, whichever is used up first."""

    def __init__(self, steps: int, seconds: float, peak: float, warmup: int, floor: float = 0.02) -> None:
        self.steps, self.seconds, self.peak, self.warmup, self.floor = steps, seconds, peak, warmup, floor
        self.step, self.start = 0, time.time()

    def progress(self) -> float:
        """0 at the start, 1 at the end."""
        spent = (time.time() - self.start) / self.seconds if self.seconds else 0.0
        return min(1.0, max(self.step / max(1, self.steps), spent))

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.progress() >= 1.0

    def lr(self) -> float:
        """The learning rate now."""
        ramp = min(1.0, (self.step + 1) / max(1, min(self.warmup, self.steps // 4 or 1)))
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress()))
        return self.peak * ramp * (self.floor + (1 - self.floor) * cosine)

    def tick(self) -> None:
        """Count a step."""
        self.step += 1


class Ema:
    """A running average of weights; it starts fast, so that the first, random weights are soon forgotten."""

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float) -> None:
        self.parameters, self.decay, self.step = parameters, decay, 0
        self.shadow = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights."""
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1 - decay)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Put the averaged weights into the model."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.shadow)
