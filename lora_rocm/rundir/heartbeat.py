"""The worker's heartbeat: one small file, overwritten in place, with a count that only progress increases.

Events record finished work, the heartbeat the current activity. Only the code that does the work beats: a separate
thread would go on beating while a step hangs. The file is overwritten in place because Windows cannot rename over a
file that is being read.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_rocm.errors import storage_error
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.files import open_in_place
from lora_rocm.foundation.json_text import parse_json

WIDTH_BYTES = 256
"""Records are padded to this width, so that a new record overwrites a longer, older one completely."""
MAX_BYTES = 1 << 12


@dataclass(frozen=True)
class Heartbeat:
    """pid: of the worker. count: beats since its start. activity: its current activity ("loader", "step", ...)."""

    pid: int
    count: int
    activity: str


class HeartbeatWriter:
    """Overwrites the file at each beat, in a few microseconds. Not flushed to disk: only running processes read it."""

    def __init__(self, path: Path) -> None:
        self.path, self._count = path, 0
        self._file = open_in_place(path, again=True, buffering=0)

    def beat(self, activity: str) -> None:
        """Record one sign of progress.

        Raises:
            StorageError: the run directory is gone, or its disk is full.
        """
        self._count += 1
        record = json.dumps(asdict(Heartbeat(os.getpid(), self._count, activity)))
        try:
            self._file.seek(0)
            self._file.write(record.encode("ascii").ljust(WIDTH_BYTES - 1) + b"\n")
        except OSError as error:
            raise storage_error(error, self.path) from error

    def close(self) -> None:
        self._file.close()


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The last beat; None if there is none, it is being written right now, or the path is not a regular file."""
    try:
        value: Any = parse_json(read_plain(path, MAX_BYTES))
        found = Heartbeat(int(value["pid"]), int(value["count"]), str(value["activity"]))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return found
