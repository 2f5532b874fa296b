"""How many transfers of a run were checked, and how many failed: over all of its sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class GuardCounts:
    """Adds up the counters of step events, which begin at 0 with each session."""

    def __init__(self, steps: Iterable[dict[str, Any]] = ()) -> None:
        self._of_session: dict[int, tuple[int, int]] = {}
        for step in steps:
            self.add(step)

    def add(self, step: dict[str, Any]) -> None:
        """Add a step event; of each session the last one counts."""
        self._of_session[step["session"]] = (step["transfer_checks"], step["transfer_failures"])

    @property
    def checks(self) -> int:
        return sum(checks for checks, _ in self._of_session.values())

    @property
    def failures(self) -> int:
        return sum(failures for _, failures in self._of_session.values())
