"""Event files as plain values, as other programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_rocm.rundir.event_types import TYPES, Event, NoticeEvent
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.run_context import RunContext


def read_events(path: Path, *types: str) -> list[dict[str, Any]]:
    """All complete events of a file (of these types), in the order written."""
    return [event.to_json() for event in EventReader(path, kinds=[TYPES[name] for name in types]).poll()]


def hearing(said: list[str], events: list[Event] | None = None) -> RunContext:
    """A context that collects notices as texts, and all other events."""

    def emit(event: Event) -> None:
        if isinstance(event, NoticeEvent):
            said.append(event.text)
        elif events is not None:
            events.append(event)

    return RunContext(emit)
