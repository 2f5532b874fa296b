"""How the parts of a run speak, show that they get on, and hear that they should stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lora_rocm.rundir.event_types import Emit, NoticeEvent


@dataclass(frozen=True)
class RunContext:
    """What every part of a run may use; by default nobody listens.

    Attributes:
        emit: writes an event.
        beat: says that there is progress, and what is done next; only the code that does the work calls it.
        should_stop: whether the run was asked to save and leave.
    """

    emit: Emit = lambda event: None
    beat: Callable[[str], None] = lambda activity: None
    should_stop: Callable[[], bool] = lambda: False

    def notice(self, text: str) -> None:
        """Tell the user a sentence."""
        self.emit(NoticeEvent(text=text))


NOBODY = RunContext()
"""A context of no run: what is said is lost."""
