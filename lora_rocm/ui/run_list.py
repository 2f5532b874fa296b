"""The runs in the folders that the user named, the newest first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.run_folder import ARCHIVE
from lora_rocm.commands.runs import ListedRun, RunFilter, runs
from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run, written_s
from lora_rocm.ui.folders import Folders


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


def newest_runs(folders: Folders, count: int | None = None, *, archived: bool = False) -> list[ShownRun]:
    """Return the newest runs of all folders with runs; all of them if ``count`` is None.

    ``archived``: whether to return the archived runs instead.
    """
    found: dict[Path, ListedRun] = {}
    for folder in folders.run_folders():
        folder = folder / ARCHIVE if archived else folder
        with contextlib.suppress(UserError):  # the folder does not exist yet
            found |= {run.path: run for run in runs(folder, RunFilter(last=count)).runs}
    ordered = sorted(found.values(), key=lambda run: run.last_event_s or 0.0, reverse=True)[:count]
    return [ShownRun(run, folders.name_of(run.path), newest_picture(RunDir(run.path))) for run in ordered]


def run_names(folders: Folders, count: int) -> list[tuple[str, str]]:
    """Return the names of the newest runs: what requests call each, and its directory's name. No event is read."""
    found = []
    for folder in folders.run_folders():
        with contextlib.suppress(OSError):  # the folder does not exist yet
            found += [RunDir(path) for path in folder.iterdir() if is_run(path)]
    newest = sorted(found, key=written_s, reverse=True)[:count]
    return [(folders.name_of(run_dir.path), run_dir.path.name) for run_dir in newest]


def newest_picture(run_dir: RunDir) -> str | None:
    """Return the path of the newest preview that is an image, relative to the run; None if there is none."""
    for _, folder in reversed(run_dir.list_samples()):
        images = sorted(path for path in folder.glob("*.png") if path.is_file())
        if images:
            return images[0].relative_to(run_dir.path).as_posix()
    return None
