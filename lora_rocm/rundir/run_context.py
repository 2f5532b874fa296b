"""Callbacks with which the parts of a run report events and progress, and learn of stop requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lora_rocm.rundir.event_types import Emit, NoticeEvent, PhaseEvent


@dataclass(frozen=True)
class RunContext:
    """Callbacks for all parts of a run; by default they do nothing.

    Attributes:
        emit: writes an event.
        beat: signals progress and names the next activity. Only the code that does the work may call it.
        should_stop: returns whether the run was asked to save and exit.
    """

    emit: Emit = lambda event: None
    beat: Callable[[str], None] = lambda activity: None
    should_stop: Callable[[], bool] = lambda: False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of a phase. Its ``phase`` event has no counterpart at its beginning."""
        began_s = time.perf_counter()
        yield
        self.emit(PhaseEvent(phase=name, state="end", seconds=round(time.perf_counter() - began_s, 3)))

    def notice(self, text: str) -> None:
        """Show the user a message."""
        self.emit(NoticeEvent(text=text))


NOBODY = RunContext()
"""A context without a run, which discards everything."""
