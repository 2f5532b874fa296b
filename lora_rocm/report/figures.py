"""Figures over steps, live or from a run's files: smoothed loss and measures, and counts of transfer checks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lora_rocm.page_parts.charts import Point
from lora_rocm.rundir.event_log import Steps
from lora_rocm.rundir.event_types import StepEvent
from lora_rocm.rundir.run_view import RunView


class Smoothed:
    """Exponential moving average, bias-corrected by the total weight of the values so far.

    weight: share of the old average that is kept when a value is added. Non-finite values are skipped.
    """

    def __init__(self, weight: float = 0.97) -> None:
        self.weight, self._sum, self._seen = weight, 0.0, 0.0

    def add(self, value: float) -> float | None:
        """Add a value; return the new average, or None if no finite value was added yet."""
        if math.isfinite(value):
            self._sum = self.weight * self._sum + (1 - self.weight) * value
            self._seen = self.weight * self._seen + (1 - self.weight)
        return self.value

    @property
    def value(self) -> float | None:
        return self._sum / self._seen if self._seen else None


def smoothed(curve: Iterable[Point], weight: float = 0.97) -> list[Point]:
    """Return the moving average of a curve. weight: share of the old average, from 0 (none) to below 1."""
    average = Smoothed(weight)
    return [(updates, value) for updates, raw in curve if (value := average.add(raw)) is not None]


class GuardCounts:
    """Sums the transfer counters of step events over sessions; each session counts from 0."""

    def __init__(self) -> None:
        self._of_session: dict[int, tuple[int, int]] = {}

    def add(self, session: int, checks: int, failures: int) -> None:
        """Store the counters of a step, which replace the counters of earlier steps of the same session."""
        self._of_session[session] = (checks, failures)

    def add_all(self, steps: Steps) -> None:
        """Store the counters of many steps."""
        columns = (steps.whole[name] for name in ("session", "transfer_checks", "transfer_failures"))
        for session, checks, failures in zip(*columns, strict=True):
            self.add(session, checks, failures)

    @property
    def checks(self) -> int:
        return sum(checks for checks, _ in self._of_session.values())

    @property
    def failures(self) -> int:
        return sum(failures for _, failures in self._of_session.values())


class Figures:
    """Smoothed values of steps, which are added in order.

    guard: counters over all sessions, including steps that were repeated later.
    """

    def __init__(self) -> None:
        self.loss, self.guard = Smoothed(), GuardCounts()
        self.measures = defaultdict[str, Smoothed](Smoothed)

    @classmethod
    def of(cls, view: RunView, most_updates: int | None = None) -> Figures:
        """Compute the figures from a run's steps, or only from its steps up to ``most_updates``."""
        figures = cls()
        figures.guard.add_all(view.log.steps)
        for updates, loss in view.steps.curve("loss"):
            if most_updates is None or updates <= most_updates:
                figures.loss.add(loss)
        for name, curve in view.steps.curves_by_name("measures").items():
            for updates, value in curve:
                if most_updates is None or updates <= most_updates:
                    figures.measures[name].add(value)
        return figures

    def add(self, step: StepEvent) -> None:
        """Add the next step."""
        self.guard.add(step.session, step.transfer_checks, step.transfer_failures)
        if step.loss is not None:
            self.loss.add(step.loss)
        for name, value in step.measures.items():
            self.measures[name].add(value)


@dataclass(frozen=True)
class RunProgress:
    """Position and speed of a run. The fields are the ones of ``StatusDocument``."""

    updates: int
    max_train_steps: int | None
    loss: float | None
    rate_per_s: float | None
    eta_s: float | None


def progress_of(view: RunView) -> RunProgress:
    """Return position and speed of a run."""
    step_s = (view.seconds_per_step or 0.0) if view.is_running else 0.0
    total = view.max_train_steps
    return RunProgress(
        updates=view.updates,
        max_train_steps=total,
        loss=Figures.of(view).loss.value,
        rate_per_s=1 / step_s if step_s else None,
        eta_s=step_s * (total - view.updates) if step_s and total else None,
    )
