"""The phases of the newest start of a run, with their counters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lora_rocm.rundir.event_types import CacheEvent, CompileEvent, PhaseEvent
from lora_rocm.rundir.run_view import RunView

LASTING = ("command", "imports", "start", "cache", "load", "compile", "export")
"""Phases that a run goes through once in each start. The others alternate while it trains."""


@dataclass(frozen=True)
class ShownPhase:
    """A phase. seconds: its duration, or None while it lasts. done, total: its counter; total is 0 if it has none."""

    name: str
    seconds: float | None
    done: int = 0
    total: int = 0
    counts: str = ""


def phases_of(view: RunView) -> list[ShownPhase]:
    """Return the phases since the newest start in their order. The last one lasts if it has no duration."""
    found: dict[str, ShownPhase] = {}
    for event in _since_start(view):
        match event:
            case PhaseEvent(state="begin") if event.phase in LASTING:
                found[event.phase] = ShownPhase(event.phase, None)
            case PhaseEvent(state="end") if event.phase in LASTING:
                before = found.get(event.phase)
                counter = (before.done, before.total, before.counts) if before else (0, 0, "")
                found[event.phase] = ShownPhase(event.phase, event.seconds, *counter)
            case CacheEvent() if "cache" in found:
                found["cache"] = ShownPhase("cache", found["cache"].seconds, event.done, event.total, event.what)
            case CompileEvent() if "compile" in found:
                found["compile"] = ShownPhase("compile", found["compile"].seconds, event.done, event.total, event.size)
    return list(found.values())


def activity_of(view: RunView) -> str | None:
    """Return the phase that has begun and not ended, or None."""
    now: str | None = None
    for event in _since_start(view):
        if isinstance(event, PhaseEvent):
            now = event.phase if event.state == "begin" else None if event.phase == now else now
    return now


def _since_start(view: RunView) -> Iterator[PhaseEvent | CacheEvent | CompileEvent]:
    """Yield the events of the newest session; the phases before the start event belong to it as well."""
    events = view.log.in_order(PhaseEvent, CacheEvent, CompileEvent)
    for event in events:
        if event.session == events[-1].session and isinstance(event, PhaseEvent | CacheEvent | CompileEvent):
            yield event
