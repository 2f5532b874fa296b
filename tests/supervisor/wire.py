"""The output of a fake child: events as JSON lines. Their classes would be most of the time that it starts in.

A reader passes over a line that its classes refuse: ``fake_run.refused`` finds it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any


class LineWriter:
    """Appends events to a file, or to the standard output."""

    def __init__(self, path: Path | None = None, session: int = 0) -> None:
        self._file = sys.stdout if path is None else path.open("a", encoding="ascii", newline="\n")
        self._session = session

    def write(self, event_type: str, **fields: Any) -> None:
        line = {"type": event_type, **fields, "time": round(time.time(), 3), "session": self._session}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def start_fields(**changes: Any) -> dict[str, Any]:
    fields = {"pid": 1, "device": "CPU", "torch": "2.13", "threads": 1, "precision": "float32", "resumed_from": None}
    return {**fields, **changes}


def step_fields(updates: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "updates": updates,
        "max_train_steps": 40,
        "iteration": updates,
        "epoch": 1,
        "loss": 0.5 / math.sqrt(updates) + 0.05 * math.sin(updates * 7),
        "learning_rate": 1e-4 * (1 - updates / 40),
        "grad_norm": 0.5,
        "step_s": 0.2,
        "loading_s": 0.001,
        "copy_s": 0.001,
        "check_s": 0.001,
        "wait_s": 0.003,
        "memory_bytes": 2**30,
        "transfer_checks": updates * 5,
        "transfer_failures": 0,
        "loss_scale": None,
        "optimizer": {},
        "measures": {},
    }
    return {**fields, **changes}
