"""The newest views of runs, so that the pieces of a page that are asked for at once read the events once."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from pathlib import Path

from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.run_view import RunView

MAX_VIEWS = 4
Key = tuple[FileVersion | None, FileVersion | None, bool, bool]


class RunViews:
    """Views of runs. A view is read again as soon as an event file, the result or the lock of its run changes."""

    def __init__(self) -> None:
        self._lock, self._views = threading.Lock(), OrderedDict[Path, tuple[Key, RunView]]()

    def of(self, run_dir: RunDir) -> RunView:
        """Return the view of a run.

        Raises:
            LoraRocmError: its events cannot be read.
        """
        with self._lock:
            files = (_version(run_dir.events()), _version(run_dir.events(SUPERVISOR)))
            key = (*files, is_running(run_dir), run_dir.result.exists())
            kept = self._views.pop(run_dir.path, None)
            view = kept[1] if kept is not None and kept[0] == key else RunView.of(run_dir)
            self._views[run_dir.path] = (key, view)
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
            return view


def _version(path: Path) -> FileVersion | None:
    with contextlib.suppress(OSError):
        return FileVersion.of(path)
    return None
