"""The runs in the folders that the user named, the newest first."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.runs import ListedRun, listed_run
from lora_rocm.foundation.bounded_read import FileVersion
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run, written_s
from lora_rocm.rundir.recipe_family import family_in
from lora_rocm.supervisor.manage_runs import ARCHIVE
from lora_rocm.ui.folders import Folders

MAX_KEPT = 2000
Key = tuple[FileVersion | None, FileVersion | None, bool, bool]


@dataclass(frozen=True)
class ShownRun:
    """A run in a list. name: what requests call it. picture: the newest preview, relative to the run, or None."""

    listed: ListedRun
    name: str
    picture: str | None

    @property
    def share(self) -> float | None:
        """The part of its steps that is done, from 0 to 1; None if the number of steps is not known."""
        done, total = self.listed.updates, self.listed.max_train_steps
        return min(1.0, done / total) if total and done is not None else None


_kept, _lock = OrderedDict[Path, tuple[Key, ListedRun]](), threading.Lock()


def newest_runs(folders: Folders, count: int | None = None, *, archived: bool = False) -> list[ShownRun]:
    """Return the newest runs of all folders with runs; all of them if ``count`` is None.

    A run is read again only if its files have changed.

    ``archived``: whether to return the archived runs instead.
    """
    newest = sorted(_run_dirs(folders, archived=archived), key=written_s, reverse=True)[:count]
    listed = sorted(map(_listed, newest), key=lambda run: run.last_event_s or 0.0, reverse=True)
    return [ShownRun(run, folders.name_of(run.path), newest_picture(RunDir(run.path))) for run in listed]


def run_names(folders: Folders, count: int) -> list[tuple[str, str]]:
    """Return the names of the newest runs: what requests call each, and its directory's name. No event is read."""
    newest = sorted(_run_dirs(folders), key=written_s, reverse=True)[:count]
    return [(folders.name_of(run_dir.path), run_dir.path.name) for run_dir in newest]


def newest_picture(run_dir: RunDir) -> str | None:
    """Return the path of the newest preview that is an image, relative to the run; None if there is none."""
    for _, folder in reversed(run_dir.list_samples()):
        images = sorted(path for path in folder.glob("*.png") if path.is_file())
        if images:
            return images[0].relative_to(run_dir.path).as_posix()
    return None


def _run_dirs(folders: Folders, *, archived: bool = False) -> Iterator[RunDir]:
    for folder in folders.run_folders():
        with contextlib.suppress(OSError):  # the folder does not exist yet
            for path in (folder / ARCHIVE if archived else folder).iterdir():
                if is_run(path):
                    yield RunDir(path)


def _listed(run_dir: RunDir) -> ListedRun:
    path = run_dir.path
    key = (_version(run_dir.events()), _version(run_dir.recipe), is_running(run_dir), run_dir.result.exists())
    with _lock:
        kept = _kept.get(path)
    if kept is not None and kept[0] == key:
        return kept[1]
    found = listed_run(run_dir, family_in(run_dir.recipe))
    with _lock:
        _kept[path] = (key, found)
        while len(_kept) > MAX_KEPT:
            _kept.popitem(last=False)
    return found


def _version(path: Path) -> FileVersion | None:
    with contextlib.suppress(OSError):
        return FileVersion.of(path)
    return None
