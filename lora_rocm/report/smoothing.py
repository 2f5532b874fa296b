"""Running averages of noisy series, for the progress bar and the report."""

from __future__ import annotations

import math


class Smoothed:
    """Exponential moving average with bias correction (divided by the weight seen so far).

    weight: share of the old average that stays at each value. Non-finite values are skipped.
    """

    def __init__(self, weight: float = 0.97) -> None:
        self.weight, self._sum, self._seen = weight, 0.0, 0.0

    def add(self, value: float) -> float | None:
        """Add a value; return the current average, or None if there is none."""
        if math.isfinite(value):
            self._sum = self.weight * self._sum + (1 - self.weight) * value
            self._seen = self.weight * self._seen + (1 - self.weight)
        return self.value

    @property
    def value(self) -> float | None:
        return self._sum / self._seen if self._seen else None
