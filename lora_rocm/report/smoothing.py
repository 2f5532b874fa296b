"""Averages that follow a noisy series; used by the progress bar and the report."""

from __future__ import annotations

import math


class Smoothed:
    """Exponential average without the pull of its start (divided by the weight that it has seen).

    weight: share of the old average that stays at each value. Values that are not finite are passed over.
    """

    def __init__(self, weight: float = 0.97) -> None:
        self.weight, self._sum, self._seen = weight, 0.0, 0.0

    def add(self, value: float) -> float | None:
        """Take in a value; returns the average so far."""
        if math.isfinite(value):
            self._sum = self.weight * self._sum + (1 - self.weight) * value
            self._seen = self.weight * self._seen + (1 - self.weight)
        return self.value

    @property
    def value(self) -> float | None:
        return self._sum / self._seen if self._seen else None
