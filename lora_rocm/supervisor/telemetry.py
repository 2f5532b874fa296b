"""Telemetry during a run: starts the process that reads the GPU's sensors, and collects its readings without waiting.

Reading a sensor may block inside a driver forever. The reading process is then killed, and the run continues and ends
without it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from lora_rocm.errors import StorageError
from lora_rocm.foundation.safe_path import python_command, python_environment
from lora_rocm.processes.process import own_group
from lora_rocm.rundir.event_line import event_of
from lora_rocm.rundir.event_types import AlarmEvent, Event, NoticeEvent, StepEvent, TelemetryEvent
from lora_rocm.telemetry.alarms import Alarms
from lora_rocm.telemetry.cards import EVERY_S, EXPLAINED, Cards, TelemetryJob
from lora_rocm.telemetry.thinning import Thinned

MODULE = "lora_rocm.telemetry.reader_child"
LIMIT_S = 60.0
"""Seconds of silence after which the reading process is killed."""
END_WAIT_S = 0.2
CHUNK_BYTES, MAX_LINE_BYTES, MAX_WAITING = 1 << 16, 1 << 20, 1000
LEFT_ALONE = "The GPU's sensors did not respond for {limit:g} s and are no longer read. Training does not need them."

Tell = Callable[[Event], None]


class _Reading:
    """A running sensor process, and the thread that collects its output."""

    def __init__(self, command: Sequence[str], now_s: float) -> None:
        self.heard_s = now_s
        self._lines = deque[bytes](maxlen=MAX_WAITING)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=python_environment(os.environ),
            **own_group(),
        )
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        assert self._child.stdout is not None
        rest, pipe = b"", self._child.stdout.fileno()
        with contextlib.suppress(OSError):
            while data := os.read(pipe, CHUNK_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                rest = rest if len(rest) < MAX_LINE_BYTES else b""
                self._lines.extend(lines)

    def events(self, now_s: float) -> list[Event]:
        """Return the events that the process has written since the last call."""
        found = []
        while self._lines:
            self.heard_s = now_s
            if (event := event_of(self._lines.popleft())) is not None:
                found.append(event)
        return found

    def exit_code(self) -> int | None:
        """Return the exit code of the process, or None until it has ended and all its output was collected."""
        return None if self._thread.is_alive() else self._child.poll()

    def kill(self) -> None:
        """Kill the process, and wait only a moment for its end, because it may be blocked in a driver."""
        with contextlib.suppress(OSError):
            self._child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(END_WAIT_S)
        self._thread.join(END_WAIT_S)
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        if not self._thread.is_alive():  # else the thread still reads from it
            self._child.stdout.close()


class Telemetry:
    """Telemetry of a run's GPUs. One object serves all starts of a command.

    Args:
        cards: GPUs to read, or a sentence with the reason why none is read. An empty text means no message.
        command: function that returns the command of the reading process.
    """

    def __init__(
        self,
        cards: Cards | str = "",
        *,
        every_s: float = EVERY_S,
        limit_s: float = LIMIT_S,
        root: str = "/",
        command: Callable[[TelemetryJob], list[str]] = lambda job: python_command("-m", MODULE, job.to_text()),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cards, self._every_s, self._limit_s, self._root = cards, every_s, limit_s, root
        self._command, self._clock = command, clock
        self._reading: _Reading | None = None
        self._tell: Tell = lambda event: None
        self._thinned: dict[str, Thinned] = {}
        self._alarms: dict[str, Alarms] = {}
        self._said: set[str] = set()
        self._updates, self._training = 0, False

    @contextlib.contextmanager
    def watching(self, pids: Sequence[int], notify: Tell) -> Iterator[None]:
        """Read the sensors within this context.

        ``notify`` records an event of the run, in the thread that calls ``poll``.
        """
        self._tell, self._training = notify, False
        for alarms in self._alarms.values():
            alarms.on_start()
        if isinstance(self._cards, str):
            if self._cards:
                self._notify(self._cards)
        elif LEFT_ALONE not in self._said:
            job = TelemetryJob(self._cards, tuple(pids), self._every_s, self._root)
            try:
                self._reading = _Reading(self._command(job), self._clock())
            except OSError as error:
                self._notify(f"Temperature, power and memory of the GPU are not read: {error}.")
        try:
            yield
        finally:
            self._stop()

    def on_event(self, event: Event) -> None:
        """Use an event of the worker to track its steps."""
        if isinstance(event, StepEvent):
            self._updates, self._training = event.updates, True
            for alarms in self._alarms.values():
                alarms.on_step()

    def poll(self) -> None:
        """Process the readings that have arrived, without waiting for more."""
        if self._reading is None:
            return
        now_s, reading = self._clock(), self._reading
        code = reading.exit_code()
        for event in reading.events(now_s):
            self._take(event, now_s)
        if code is not None:
            self._stop()
            if code != EXPLAINED:
                self._notify(
                    f"The process that reads the GPU's sensors has ended (exit code {code}). Training continues."
                )
        elif now_s - reading.heard_s > self._limit_s:
            self._stop()
            self._said.add(LEFT_ALONE)
            self._notify(LEFT_ALONE.format(limit=self._limit_s))

    def _take(self, event: Event, now_s: float) -> None:
        if isinstance(event, NoticeEvent):
            self._notify(event.text)
        if not isinstance(event, TelemetryEvent) or isinstance(self._cards, str):
            return
        found = event.model_copy(update={"updates": self._updates})
        if found.gpu not in self._alarms:
            self._alarms[found.gpu], self._thinned[found.gpu] = Alarms(self._cards.spills), Thinned()
            if self._training:
                self._alarms[found.gpu].on_step()
        summary = self._thinned[found.gpu].add(found, now_s)
        alarms: list[AlarmEvent] = self._alarms[found.gpu].on_reading(found)
        for each in [summary, *alarms]:
            if each is not None:
                self._record(each)

    def _notify(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._record(NoticeEvent(text=text))

    def _record(self, event: Event) -> None:
        # Readings may be lost: a full disk stops the run at a write that matters.
        with contextlib.suppress(StorageError):
            self._tell(event)

    def _stop(self) -> None:
        if self._reading is not None:
            self._reading.kill()
            self._reading = None
            for thinned in self._thinned.values():
                if (rest := thinned.rest()) is not None:
                    self._record(rest)
