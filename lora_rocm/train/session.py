"""One start of the worker: its event stream, its stop switch, its phases."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lora_rocm.errors import MachineError, StoppedError
from lora_rocm.run.events import EventWriter, read_events
from lora_rocm.run.layout import RunDir

ORPHAN_GRACE_S = 30.0


class Session:
    """What every phase of a run uses to say what happens and to hear that it should stop."""

    def __init__(self, run_dir: RunDir, watch_parent: bool) -> None:
        self.run_dir = run_dir
        past = read_events(run_dir.events())
        self.events = EventWriter(run_dir.events(), session=sum(event["type"] == "start" for event in past) + 1)
        self.readers: list[Callable[[dict[str, Any]], None]] = []
        self._orphaned = threading.Event()
        if watch_parent:
            threading.Thread(target=self._watch_parent, daemon=True, name="parent-watch").start()

    def emit(self, event_type: str, **fields: Any) -> None:
        event = self.events.write(event_type, **fields)
        for reader in self.readers:
            reader(event)

    def notice(self, text: str) -> None:
        self.emit("notice", text=text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self.emit("phase", phase=name, state="begin", seconds=0.0)
        yield
        self.emit("phase", phase=name, state="end", seconds=round(time.perf_counter() - started, 3))

    def stop_requested(self) -> bool:
        return self._orphaned.is_set() or self.run_dir.stop.exists()

    def cache_progress(self, what: str, done: int, total: int, per_second: float) -> None:
        """Progress of the caches; also where caching is left when a stop was asked for."""
        self.emit("cache", what=what, done=done, total=total, per_second=round(per_second, 2))
        if self.stop_requested():
            raise StoppedError(
                "stopped",
                "Stopped while encoding; what is encoded stays.",
                fix="Run again with --resume latest to go on.",
            )

    def repaired(self, kind: str, item: str, reason: str) -> None:
        """A damaged cache entry was encoded again."""
        self.emit("repaired", kind=kind, item=item, reason=reason)

    def _watch_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would be held at interpreter exit
            pass
        self._orphaned.set()
        time.sleep(ORPHAN_GRACE_S)
        os._exit(MachineError.exit_code)  # a step that does not end must not keep the directory for ever
