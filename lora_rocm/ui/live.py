"""The live stream: one stream of server-sent events for each tab, which notifies a page of changes.

One thread reads the event files of the runs that are being watched, from the place where each stream is. The ``id`` of
a message has the number of bytes read of both event files, so a reconnecting browser continues at the same place. A
message names what has changed; the page then asks for the pieces that depend on it. New steps are in the message.

A deleted run, and an event file that became shorter, are messages as well. No GPU is asked, and nothing is locked for
longer than ``status`` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.errors import LoraRocmError
from lora_rocm.rundir.event_types import StepEvent
from lora_rocm.rundir.events import EventReader, size_if_there
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.newest import is_run, written_s
from lora_rocm.supervisor.queue_dir import QueueDir
from lora_rocm.ui.folders import Folders

POLL_S = 0.5
LOCKS_EVERY = 4
"""The locks of runs are tried at every fourth reading: each takes a lock for a moment."""
KEEP_ALIVE_S = 15.0
MAX_STREAMS = 64
MAX_WAITING = 256
"""Messages that wait for a slow browser. Beyond that, it has to ask for everything again."""
MAX_STEPS = 500
"""Steps in one message; a page that missed more asks for the whole curve."""
RESET, GONE = "reset", "gone"


def live_id(run_dir: RunDir) -> str:
    """Return the place at the end of a run's event files, for the stream of a page that shows everything up to here."""
    return f"{_size(run_dir.events())}-{_size(run_dir.events(SUPERVISOR))}"


def _size(path: Path) -> int:
    with contextlib.suppress(LoraRocmError, OSError):
        return size_if_there(path) or 0
    return 0


def _inode(path: Path) -> int:
    """Return the number of a file in its file system; 0 if there is none."""
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0


@dataclass(frozen=True)
class LiveMessage:
    """One message of the stream. changed: the names of the changes. steps: new steps, as lists of numbers."""

    id: str
    changed: frozenset[str]
    steps: tuple[tuple[float | None, ...], ...] = ()

    def to_bytes(self) -> bytes:
        data = json.dumps({"changed": sorted(self.changed), "steps": self.steps})
        return f"id: {self.id}\nevent: live\ndata: {data}\n\n".encode("ascii")


@dataclass(eq=False)
class TabStream:
    """The stream of one tab.

    Attributes:
        run_dir: the run that it watches; None for the list of runs.
        offsets: bytes read of the run's event file and of its supervisor's.
    """

    loop: asyncio.AbstractEventLoop
    run_dir: RunDir | None
    offsets: tuple[int, int]
    queue: asyncio.Queue[LiveMessage | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))
    readers: list[EventReader] = field(init=False)
    inode: int = 0
    was_running: bool | None = None
    is_gone: bool = False

    def __post_init__(self) -> None:
        self._read_from(self.offsets)

    def _read_from(self, offsets: tuple[int, int]) -> None:
        if self.run_dir is not None:
            files = (self.run_dir.events(), self.run_dir.events(SUPERVISOR))
            self.readers = [EventReader(path, offset) for path, offset in zip(files, offsets, strict=True)]
            self.inode = _inode(files[0])

    @property
    def id(self) -> str:
        if self.run_dir is None:
            return "0-0"
        return "-".join(str(reader.offset) for reader in self.readers)

    def enqueue(self, message: LiveMessage | None) -> None:
        """Queue a message; called in the event loop. A browser that is too slow gets RESET in place of all others."""
        if self.queue.full():
            while not self.queue.empty():
                self.queue.get_nowait()
            message = message and LiveMessage(message.id, frozenset((RESET,)))
        self.queue.put_nowait(message)

    def poll(self, *, with_lock: bool) -> LiveMessage | None:
        """Return a message about new events of the run, or None. Called in the live thread."""
        assert self.run_dir is not None
        if not is_run(self.run_dir.path):
            was_there, self.is_gone = not self.is_gone, True
            return LiveMessage(self.id, frozenset((GONE,))) if was_there else None
        # a run that came back, another one with its name, and a file that became shorter are read again
        is_other, self.is_gone = self.is_gone or self.inode not in (0, _inode(self.readers[0].path)), False
        sizes = [_size(reader.path) for reader in self.readers]
        if is_other or any(size < reader.offset for size, reader in zip(sizes, self.readers, strict=True)):
            self._read_from((sizes[0], sizes[1]))
            return LiveMessage(self.id, frozenset((RESET,)))
        # read both files
        self.inode = self.inode or _inode(self.readers[0].path)
        changed, steps = set[str](), list[StepEvent]()
        for reader in self.readers:
            try:
                events = reader.poll()
            except (LoraRocmError, OSError):  # unreadable at the moment; the run's page shows why
                continue
            changed |= {event.type for event in events}
            steps += [event for event in events if isinstance(event, StepEvent)]
        if len(steps) > MAX_STEPS:
            changed, steps = changed | {RESET}, []
        # compare the lock
        if with_lock or changed:
            running = is_running(self.run_dir)
            if self.was_running not in (None, running):
                changed.add("state")
            self.was_running = running
        if not changed:
            return None
        return LiveMessage(self.id, frozenset(changed), tuple(map(step_numbers, steps)))


def step_numbers(step: StepEvent) -> tuple[float | None, ...]:
    """Return the numbers of a step that charts show: updates, loss, learning rate, memory in bytes, seconds."""
    return (step.updates, step.loss, step.learning_rate, step.memory_bytes, step.step_s)


class Live:
    """The live streams of one server, and the thread that feeds them. The thread exists while there are streams."""

    def __init__(self, folders: Folders) -> None:
        self._folders, self._lock, self._streams = folders, threading.Lock(), list[TabStream]()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._known: dict[Path, tuple[float, bool]] = {}
        self._queue: Collection[object] = ()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def subscribe(self, run_dir: RunDir | None, offsets: tuple[int, int]) -> TabStream | None:
        """Begin a stream; None if there are too many, or the server is about to end."""
        stream = TabStream(asyncio.get_running_loop(), run_dir, offsets)
        with self._lock:
            if len(self._streams) >= MAX_STREAMS or self._closed.is_set():
                return None
            self._streams.append(stream)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._feed, daemon=True, name="ui-live")
                self._thread.start()
        return stream

    def unsubscribe(self, stream: TabStream) -> None:
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)

    def announce(self, changed: set[str]) -> None:
        """Send a message to every tab, from any thread."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            self._send(stream, LiveMessage(stream.id, frozenset(changed)))

    def close(self) -> None:
        """End all streams, from any thread."""
        self._closed.set()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            self._send(stream, None)

    async def messages(self, stream: TabStream) -> AsyncIterator[bytes]:
        """Yield the bytes of a stream until the browser leaves or the server ends."""
        try:
            yield b"retry: 1000\n\n"
            while True:
                try:
                    message = await asyncio.wait_for(stream.queue.get(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield b": idle\n\n"
                    continue
                if message is None:
                    return
                yield message.to_bytes()
        finally:
            self.unsubscribe(stream)

    def _send(self, stream: TabStream, message: LiveMessage | None) -> None:
        with contextlib.suppress(RuntimeError):  # its loop has ended
            stream.loop.call_soon_threadsafe(stream.enqueue, message)

    def _feed(self) -> None:
        number = 0
        while not self._closed.wait(POLL_S):
            with self._lock:
                streams = list(self._streams)
                if not streams:
                    self._thread = None
                    return
            number += 1
            with_lock = number % LOCKS_EVERY == 0
            changed = self._lists_changed() if with_lock else frozenset[str]()
            for stream in streams if changed else ():
                self._send(stream, LiveMessage(stream.id, changed))
            for stream in streams:
                if stream.run_dir is not None and (message := stream.poll(with_lock=with_lock)) is not None:
                    self._send(stream, message)

    def _lists_changed(self) -> frozenset[str]:
        """Return "runs" and "queue", if they have changed since the last call."""
        queue, before = queue_state(QueueDir(self._folders.queue)), self._queue
        self._queue = queue
        return frozenset((*(["runs"] if self._runs_changed() else []), *(["queue"] if queue != before else [])))

    def _runs_changed(self) -> bool:
        """Whether a run appeared, ended, began, disappeared or wrote events since the last call."""
        found: dict[Path, tuple[float, bool]] = {}
        for folder in self._folders.run_folders():
            with contextlib.suppress(OSError):  # no such folder yet
                for path in folder.iterdir():
                    if is_run(path):
                        found[path] = (written_s(RunDir(path)), is_running(RunDir(path)))
        changed, self._known = found != self._known, found
        return changed


def queue_state(queue: QueueDir) -> frozenset[object]:
    """Return a value that differs after a recipe was added, changed, moved, begun, finished or failed."""
    found: set[object] = {queue.is_run(), queue.stop.exists()}
    for folder in (queue.path, queue.started, queue.done):
        with contextlib.suppress(OSError):  # no queue yet
            for entry in os.scandir(folder):
                if not entry.name.startswith("."):
                    found.add((folder, entry.name, entry.stat(follow_symlinks=False).st_mtime_ns))
    return frozenset(found)


def offsets_of(text: str) -> tuple[int, int] | None:
    """Return the two numbers of a message's id, or None if the text is not one."""
    first, _, second = text.partition("-")
    if not (first.isascii() and first.isdigit() and second.isascii() and second.isdigit()):
        return None
    if max(len(first), len(second)) > 18:
        return None
    return int(first), int(second)
