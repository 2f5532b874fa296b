"""Recorded files of Linux as a folder, and readings made up for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_rocm.rundir.event_types import TelemetryEvent
from lora_rocm.telemetry.reader import reading

TREES = Path(__file__).parent / "trees"
XTX, HALO, TRAINER = "0000:03:00.0", "0000:c5:00.0", 4242
GIB = 1 << 30


def write_tree(root: Path, name: str = "rx7900xtx", changes: dict[str, str | None] | None = None) -> Path:
    """The files of a recorded machine below ``root``; None in ``changes`` leaves one out. Returns the GPU's folder."""
    files: dict[str, str] = json.loads((TREES / f"{name}.json").read_text(encoding="utf-8"))["files"]
    gpu = next(path for path in files if path.endswith("/power/runtime_status")).removesuffix("/power/runtime_status")
    for path, text in {**files, **{f"{gpu}/{key}": text for key, text in (changes or {}).items()}}.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    return root / gpu


def read_as(**values: Any) -> TelemetryEvent:
    """A reading of a card of 16 GiB with a quiet run on it."""
    usual = {
        "temperatures_c": {"edge": 60.0, "junction": 80.0},
        "limits_c": {"edge": 100.0, "junction": 110.0},
        "power_w": 200.0,
        "power_cap_w": 220.0,
        "memory_bytes": 12.0 * GIB,
        "memory_total_bytes": 16.0 * GIB,
        "own_bytes": 11.0 * GIB,
        "own_main_bytes": 0.25 * GIB,
    }
    return reading(XTX, 0, values.pop("unread", {}), **{**usual, **values})
