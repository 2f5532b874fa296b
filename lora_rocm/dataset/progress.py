"""How far work over very many images is: what the user sees, what the watchdog hears, and where a stop is noticed."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str, int, int, float], None]
"""Called with what, done, total, per_second. It may raise: the work stops there, and goes on there the next time."""

REPORT_EVERY_S = 0.25
QUIET_S = 2.0
"""Of work that only takes long with very many images nothing is said before."""


def ignore(what: str, done: int, total: int, per_second: float) -> None:
    """A report that nobody reads."""


class Progress:
    """Passes progress on, at most a few times a second, and always the end; of work that is soon done nothing at all.

    Args:
        what: the work, in one word (``run.progress.CACHE_WORK``).
        total: how much there is to do.
        report: see ``Report``.
        done: of it before.
        quiet_s: work that takes less is not worth a word.
    """

    def __init__(self, what: str, total: int, report: Report, done: int = 0, quiet_s: float = 0.0) -> None:
        self._what, self._total, self._report = what, total, report
        self._done = self._done_before = done
        self._started = time.perf_counter()
        self._next, self._said = self._started + quiet_s, quiet_s == 0.0

    def skip(self, count: int) -> None:
        """So many more were there before: they say nothing about the speed."""
        self._done_before += count
        self.step(count)

    def step(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        now = time.perf_counter()
        if now >= self._next or (self._said and self._done == self._total):
            self._next, self._said = now + REPORT_EVERY_S, True
            rate = (self._done - self._done_before) / max(now - self._started, 1e-9)
            self._report(self._what, self._done, self._total, rate)
