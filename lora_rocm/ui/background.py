"""Long work that a page starts: one thread each, which waits for a child process or reads many files.

A handler returns at once, and the page shows ``progress`` until the work ends. The page learns of each change by the
live stream. Work ends with the server. Training outlives it, because it is its own process.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_rocm.commands.output import Failure
from lora_rocm.errors import LoraRocmError, StoppedError, UserError

MAX_LINES = 200
PAUSE_S = 0.25
"""Shortest time between two announcements of progress."""


def key_of(kind: str, name: str) -> str:
    """Return the key of work on a run. kind: the kind of work. name: what requests call the run."""
    return f"{kind}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


@dataclass
class Work:
    """Work in the background.

    Attributes:
        key: the name under which a page finds it.
        lines: its reported lines, the newest last.
        done, total: counted progress; total is 0 if it is not countable.
        result: the value that it returned.
        error: the error with which it ended.
        began_s: when it began, in seconds since the epoch.
    """

    key: str
    lines: list[str] = field(default_factory=list)
    done: int = 0
    total: int = 0
    result: Any = None
    error: LoraRocmError | None = None
    began_s: float = field(default_factory=time.time)
    _asked: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _announce: Callable[[bool], None] = lambda at_once: None

    @property
    def status(self) -> Literal["running", "done", "failed", "cancelled"]:
        if not self._ended.is_set():
            return "running"
        if isinstance(self.error, StoppedError):
            return "cancelled"
        return "failed" if self.error is not None else "done"

    @property
    def failure(self) -> Failure | None:
        """The error as pages show it, or None."""
        return None if self.error is None else Failure.of(self.error)

    @property
    def is_cancelled(self) -> bool:
        """Whether the user asked to cancel. The work checks it between two pieces, and ends its child."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until the work has ended, but no longer than this. So a page shows short work as done at once."""
        self._ended.wait(timeout_s)

    def cancel(self) -> None:
        """Ask the work to end."""
        self._asked.set()

    def report(self, text: str) -> None:
        """Add a line. It is a ``Notify``, so commands take it as it is."""
        self.lines = [*self.lines, *text.splitlines()][-MAX_LINES:]
        self._announce(False)

    def advance(self, done: int, total: int) -> None:
        """Set the counted progress.

        Raises:
            StoppedError: the user asked to cancel.
        """
        self.done, self.total = done, total
        self._announce(False)
        self.require_wanted()

    def require_wanted(self) -> None:
        """Check whether the user still wants the result.

        Raises:
            StoppedError: the user asked to cancel.
        """
        if self.is_cancelled:
            raise StoppedError("cancelled", "This was cancelled in the page.")


class Background:
    """The work of one server, by key. A key has one work at a time; its last result stays until the next.

    Args:
        announce: called with the key after each change.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce, self._lock = announce, threading.Lock()
        self._works: dict[str, Work] = {}

    def start(self, key: str, function: Callable[[Work], Any]) -> Work:
        """Call ``function(work)`` in a new thread, and return its work at once.

        Raises:
            UserError: work-runs-already: work with this key has not ended yet.
        """
        with self._lock:
            if (now := self._works.get(key)) is not None and now.status == "running":
                fix = "Wait until it ends, or cancel it."
                raise UserError("work-runs-already", "This is being done already.", where=key, fix=fix)
            work = self._works[key] = Work(key)
        last_s = [0.0]

        def announce(at_once: bool) -> None:
            if at_once or time.monotonic() - last_s[0] >= PAUSE_S:
                last_s[0] = time.monotonic()
                self._announce(key)

        work._announce = announce
        threading.Thread(target=self._run, args=(work, function), daemon=True, name=f"ui-{key}").start()
        return work

    def _run(self, work: Work, function: Callable[[Work], Any]) -> None:
        try:
            work.result = function(work)
        except LoraRocmError as error:
            work.error = error
        except Exception as error:  # edge: the page shows it, and the server goes on
            what = f"This failed in an unexpected way: {type(error).__name__}: {error}"
            work.error = LoraRocmError("page-failed", what, fix="Please report this as a bug.")
        finally:
            work._ended.set()
            work._announce(True)

    def of(self, key: str) -> Work | None:
        """Return the newest work with this key, or None."""
        return self._works.get(key)

    def close(self) -> None:
        """Ask all work to end."""
        for work in list(self._works.values()):
            work.cancel()
