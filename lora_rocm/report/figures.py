"""What steps add up to: smoothed loss and measures, and the guard's counts; live, or of a run in its files."""

from __future__ import annotations

from collections import defaultdict

from lora_rocm.report.guard_counts import GuardCounts
from lora_rocm.report.smoothing import Smoothed
from lora_rocm.rundir.event_types import StepEvent
from lora_rocm.rundir.run_view import RunView


class Figures:
    """Takes steps in their order. guard: over all sessions, also of steps that were made again later."""

    def __init__(self) -> None:
        self.loss, self.guard = Smoothed(), GuardCounts()
        self.measures = defaultdict[str, Smoothed](Smoothed)

    @classmethod
    def of(cls, view: RunView, most_updates: int | None = None) -> Figures:
        """The figures after the steps of a run, or after those up to ``most_updates``."""
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
        """Take one more step."""
        self.guard.add(step.session, step.transfer_checks, step.transfer_failures)
        if step.loss is not None:
            self.loss.add(step.loss)
        for name, value in step.measures.items():
            self.measures[name].add(value)
