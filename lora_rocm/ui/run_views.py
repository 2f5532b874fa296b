"""The newest views of runs, so that the pieces of a page that are asked for at once read the events once.

While a run trains, only the new lines of its event files are read for the next view.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.rundir.event_index import read_log
from lora_rocm.rundir.event_log import EventLog
from lora_rocm.rundir.events import EventReader, size_if_there
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.run_view import RunView

MAX_VIEWS = 4
Key = tuple[FileVersion | None, FileVersion | None, bool, bool, FileVersion | None]


class _GrowingLog:
    """The events of a file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.inode = _inode(self.path)
        self.log: EventLog = read_log(self.path)
        self.reader = EventReader(self.path, self.log.num_bytes)

    def read(self) -> EventLog:
        """Return the log with the new lines. A file that was replaced or became shorter is read again.

        A log that was returned before stays as it is: another thread may be reading it.

        Raises:
            StorageError: see ``events.size_if_there``.
        """
        if _inode(self.path) != self.inode or (size_if_there(self.path) or 0) < self.reader.offset:
            self._begin()
            return self.log
        with contextlib.suppress(FileNotFoundError):
            if lines := list(self.reader.lines()):
                self.log = self.log.copy()
                self.log.read(lines)
        return self.log


class RunViews:
    """Views of runs. A view is renewed as soon as an event file, the result, an export or the lock changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept = OrderedDict[Path, tuple[Key, RunView, _GrowingLog, _GrowingLog]]()

    def of(self, run_dir: RunDir) -> RunView:
        """Return the view of a run.

        Raises:
            LoraRocmError: its events cannot be read.
        """
        with self._lock:
            paths = run_dir.events(), run_dir.events(SUPERVISOR)
            running = is_running(run_dir)  # first: if the run ends meanwhile, its end is still read below
            key = (_version(paths[0]), _version(paths[1]), running, run_dir.result.exists(), _version(run_dir.exports))
            kept = self._kept.pop(run_dir.path, None)
            if kept is None:
                events, supervisor = _GrowingLog(paths[0]), _GrowingLog(paths[1])
            else:
                _, view, events, supervisor = kept
            if kept is None or kept[0] != key:
                logs = events.read(), supervisor.read()
                view = RunView.of_logs(run_dir, *logs, is_running=running)
            self._kept[run_dir.path] = (key, view, events, supervisor)
            while len(self._kept) > MAX_VIEWS:
                self._kept.popitem(last=False)
            return view


def _version(path: Path) -> FileVersion | None:
    with contextlib.suppress(OSError):
        return FileVersion.of(path)
    return None


def _inode(path: Path) -> int:
    version = _version(path)
    return version.inode if version is not None else 0
