"""The worker's heartbeat: a small file, overwritten in place, with a counter that only progress increases.

Events record finished work, the heartbeat records the current activity. Only the code that does the work writes it: a
separate thread would continue to write while a step hangs. The file is overwritten in place because Windows cannot
rename a file over one that is being read.
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
"""Records are padded to this width, so that a new record completely overwrites a longer old one."""
MAX_BYTES = 1 << 12


@dataclass(frozen=True)
class Heartbeat:
    """A record of the worker's progress.

    pid: the worker's process id. count: number of records written since its start. activity: its current activity
    ("loader", "step", ...).
    """

    pid: int
    count: int
    activity: str


class HeartbeatWriter:
    """Overwrites the file on each call of ``beat``, in a few microseconds.

    It is not flushed to disk: only running processes read it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._count = path, 0
        self._file = open_in_place(path, again=True, buffering=0)

    def beat(self, activity: str) -> None:
        """Record progress, and name the activity that starts now.

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
    """Return the last record; None if it is missing, being written right now, or not in a regular file."""
    try:
        value: Any = parse_json(read_plain(path, MAX_BYTES))
        found = Heartbeat(int(value["pid"]), int(value["count"]), str(value["activity"]))
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        return None
    return found
