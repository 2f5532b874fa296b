"""Callbacks by which the parts of a run report events and progress, and receive stop requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lora_rocm.rundir.event_types import Emit, NoticeEvent


@dataclass(frozen=True)
class RunContext:
    """Callbacks for every part of a run; by default they do nothing.

    Attributes:
        emit: writes an event.
        beat: signals progress and names the next activity; only the code that does the work calls it.
        should_stop: whether the run was asked to save and exit.
    """

    emit: Emit = lambda event: None
    beat: Callable[[str], None] = lambda activity: None
    should_stop: Callable[[], bool] = lambda: False

    def notice(self, text: str) -> None:
        """Show the user a message."""
        self.emit(NoticeEvent(text=text))


NOBODY = RunContext()
"""A context without a run: it discards everything."""
