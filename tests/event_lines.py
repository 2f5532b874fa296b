"""Event files as plain values, as other programs read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_rocm.rundir.event_types import TYPES
from lora_rocm.rundir.events import EventReader


def read_events(path: Path, *types: str) -> list[dict[str, Any]]:
    """All complete events of a file (of these types), in the order written."""
    return [event.to_json() for event in EventReader(path, kinds=[TYPES[name] for name in types]).poll()]
