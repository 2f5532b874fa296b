"""Reports the progress of work over many images to the user and the watchdog. Stop requests also take effect here."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str, int, int, float], None]
"""Function called with the work's name, the amount done, the total, and the speed per second.

If it raises, the work stops; the next run continues it.
"""

REPORT_EVERY_S = 0.25
QUIET_S = 2.0
"""Delay in seconds before the first report, for work that takes long only with very many images."""


def ignore(what: str, done: int, total: int, per_second: float) -> None:
    """A ``Report`` that does nothing."""


class Progress:
    """Reports progress at most a few times per second, and always at the end.

    Work shorter than ``quiet_s`` is not reported.

    Args:
        what: the work, in one word (``report.progress_bar.CACHE_WORK``).
        total: the total amount of work.
        report: the function that receives the reports; see ``Report``.
        done: the amount done before the start.
        quiet_s: delay in seconds before the first report.
    """

    def __init__(self, what: str, total: int, report: Report, done: int = 0, quiet_s: float = 0.0) -> None:
        self._what, self._total, self._report = what, total, report
        self._done = self._done_before = done
        self._started = time.perf_counter()
        self._next, self._said = self._started + quiet_s, quiet_s == 0.0

    def skip(self, count: int) -> None:
        """Advance by ``count`` items that needed no work and are therefore excluded from the speed."""
        self._done_before += count
        self.step(count)

    def step(self, count: int = 1) -> None:
        """Advance by ``count`` finished items."""
        self._done += count
        now = time.perf_counter()
        if now >= self._next or (self._said and self._done == self._total):
            self._next, self._said = now + REPORT_EVERY_S, True
            rate = (self._done - self._done_before) / max(now - self._started, 1e-9)
            self._report(self._what, self._done, self._total, rate)
