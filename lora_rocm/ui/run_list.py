"""The runs in the folders that the user named, the newest first."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.runs import ListedRun, RunFilter, runs
from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
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


def newest_runs(folders: Folders, count: int | None = None) -> list[ShownRun]:
    """Return the newest runs of all folders with runs; all of them if ``count`` is None."""
    found: dict[Path, ListedRun] = {}
    for folder in folders.run_folders():
        with contextlib.suppress(UserError):  # the folder does not exist yet
            found |= {run.path: run for run in runs(folder, RunFilter(last=count)).runs}
    ordered = sorted(found.values(), key=lambda run: run.last_event_s or 0.0, reverse=True)[:count]
    return [ShownRun(run, folders.name_of(run.path), newest_picture(RunDir(run.path))) for run in ordered]


def newest_picture(run_dir: RunDir) -> str | None:
    """Return the path of the newest preview that is an image, relative to the run; None if there is none."""
    for _, folder in reversed(run_dir.list_samples()):
        images = sorted(path for path in folder.glob("*.png") if path.is_file())
        if images:
            return images[0].relative_to(run_dir.path).as_posix()
    return None
