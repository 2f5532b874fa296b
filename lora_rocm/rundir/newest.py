"""The runs in a folder: the newest one, and the path of a new one. No recipe is read, so that it is quick."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.remains import TEMPORARY


def is_run(path: Path) -> bool:
    """Whether there is a run at ``path``; False for an unfinished fork, or a folder that this user may not read."""
    try:
        return not TEMPORARY.fullmatch(path.name) and path.is_dir() and RunDir(path).holds_run()
    except OSError:
        return False


def new_run_path(folder: Path, name: str) -> Path:
    """Return the path ``<folder>/<name>-<time>`` for a new run, with a number appended if that exists already."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / stem, 2
    while os.path.lexists(path):
        path = folder / f"{stem}-{number}"
        number += 1
    return path


def newest_in(folder: Path) -> Path:
    """Return the run with the newest events in a folder. If the folder is itself a run, return it.

    Raises:
        UserError: there is no run in the folder.
    """
    if folder.is_dir() and is_run(folder):
        return folder
    found = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    if not found:
        fix = "Name a run directory, or the folder of the runs with --runs-dir (output.dir of the recipe)."
        raise UserError("no-run", "There is no run in this folder.", where=str(folder), fix=fix)
    return max(found, key=lambda path: (written_s(RunDir(path)), path.name))


def written_s(run_dir: RunDir) -> float:
    """Return when a run was last written to; 0 if its files cannot be examined."""
    for file in (run_dir.events(), run_dir.recipe):  # before its first event, a run has only a recipe
        try:
            return file.stat().st_mtime
        except OSError:
            continue
    return 0.0
