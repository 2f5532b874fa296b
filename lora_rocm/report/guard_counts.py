"""How many transfers of a run were checked, and how many failed: over all of its sessions."""

from __future__ import annotations

from lora_rocm.rundir.event_log import Steps


class GuardCounts:
    """Adds up the counters of step events, which begin at 0 with each session."""

    def __init__(self) -> None:
        self._of_session: dict[int, tuple[int, int]] = {}

    def add(self, session: int, checks: int, failures: int) -> None:
        """Add the counters of a step; of each session the last one counts."""
        self._of_session[session] = (checks, failures)

    def add_all(self, steps: Steps) -> None:
        """Add the counters of many steps."""
        columns = (steps.whole[name] for name in ("session", "transfer_checks", "transfer_failures"))
        for session, checks, failures in zip(*columns, strict=True):
            self.add(session, checks, failures)

    @property
    def checks(self) -> int:
        return sum(checks for checks, _ in self._of_session.values())

    @property
    def failures(self) -> int:
        return sum(failures for _, failures in self._of_session.values())
