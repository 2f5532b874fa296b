"""One start of the worker: its events, heartbeat, stop requests and phases."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lora_rocm.errors import MachineError
from lora_rocm.foundation.files import open_in_place
from lora_rocm.rundir.event_types import CacheEvent, Event, PhaseEvent, StartEvent, StepEvent
from lora_rocm.rundir.events import EventWriter, read_events
from lora_rocm.rundir.heartbeat import HeartbeatWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext

ORPHAN_GRACE_S = 30.0
BEGINNINGS = {"cache": "cache_first", "step": "first_step"}
STACKS_REARM = 4  # arming starts a thread, so it is done at most this often per waiting time


class Session:
    """Lets all phases of a run emit events, signal progress, and learn of stop requests.

    Args:
        run_dir: the run directory, locked by this process.
        watch_parent: whether to exit when standard input ends.
        stacks_after_s: by activity, seconds of silence after which the stacks of all threads are written
            (``supervisor.hang_detection.Limits.stacks_after_s``), or None to write none.
        rank: the rank of this process; each rank has its own files.
    """

    def __init__(
        self, run_dir: RunDir, watch_parent: bool, stacks_after_s: Mapping[str, float] | None = None, rank: int = 0
    ) -> None:
        self.run_dir, self.rank = run_dir, rank
        self._phases = ["start"]
        self._under_way = set[str]()  # phases of BEGINNINGS that are past their slow beginning
        self._heartbeat = HeartbeatWriter(run_dir.heartbeat(rank))
        self._stacks = Stacks(run_dir.stacks(rank), stacks_after_s) if stacks_after_s is not None else None
        self.beat("start")
        past = read_events(run_dir.events(rank), StartEvent)
        self.events = EventWriter(run_dir.events(rank), session=len(past) + 1)
        self.readers: list[Callable[[Event], None]] = []
        self.at_close = ExitStack()
        self.context = RunContext(self.emit, self.beat, self.stop_requested)
        self._orphaned = threading.Event()
        if watch_parent:
            threading.Thread(target=self._watch_parent, daemon=True, name="parent-watch").start()

    def emit(self, event: Event) -> None:
        self.events.write(event)
        if isinstance(event, StepEvent) or (isinstance(event, CacheEvent) and event.encodes):
            self._under_way.add(event.type)
        elif isinstance(event, CacheEvent):  # another encoder is loaded next
            self._under_way.discard("cache")
        for reader in self.readers:
            reader(event)

    def beat(self, activity: str) -> None:
        """Signal progress, and name the next activity. Only the code that does the work may call it."""
        self._heartbeat.beat(activity)
        if self._stacks is not None:
            now = self._phases[-1]
            self._stacks.postpone(BEGINNINGS.get(now, now) if now not in self._under_way else now)

    def close(self) -> None:
        """Close the files and everything in ``at_close``. Afterwards nothing is reported or watched."""
        self.at_close.close()
        self.events.close()
        self._heartbeat.close()
        if self._stacks is not None:
            self._stacks.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._phases.append(name)
        self.beat(name)
        self.emit(PhaseEvent(phase=name, state="begin", seconds=0.0))
        yield
        self._phases.pop()
        self.emit(PhaseEvent(phase=name, state="end", seconds=round(time.perf_counter() - started, 3)))

    def stop_requested(self) -> bool:
        return self._orphaned.is_set() or self.run_dir.stop.exists()

    def _watch_parent(self) -> None:
        while os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would be held at interpreter exit
            pass
        self._orphaned.set()
        time.sleep(ORPHAN_GRACE_S)
        os._exit(MachineError.exit_code)  # a step that does not end must not lock the directory forever


class Stacks:
    """Writes the stacks of all threads to a file after a silence, with Python's watchdog (``faulthandler``).

    The watchdog is a C thread, so it works even if another thread holds the GIL. It writes once per silence, because
    each write may crash the process: it reads data that running threads change.
    """

    def __init__(self, path: Path, after_s: Mapping[str, float]) -> None:
        self._after_s, self._armed_at, self._doing = after_s, float("-inf"), ""
        self._file = open_in_place(path, again=True)

    def postpone(self, doing: str) -> None:
        """Signal progress: restart the countdown, and discard stacks that were already written.

        ``doing``: the current activity, which determines the length of the countdown.
        """
        now, after_s = time.monotonic(), self._after_s.get(doing, self._after_s["start"])
        if doing == self._doing and now - self._armed_at < after_s / STACKS_REARM:
            return
        self._armed_at, self._doing = now, doing
        self._file.seek(0)
        self._file.truncate()  # writes: its own open file
        faulthandler.dump_traceback_later(after_s, file=self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
