"""The files of a run that a browser may save, and the places of exports that the page starts."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from lora_rocm.errors import LoraRocmError
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.results import updates_of
from lora_rocm.rundir.run_view import RunView

EARLIER = re.compile(r"earlier-exports/step-(\d{8})/peft")
MAX_FILES = 200
"""Files that are listed of one folder. A merged model has some ten."""


@dataclass(frozen=True)
class ResultFolder:
    """A result that is a folder, such as a PEFT adapter. files: its files, also those one folder below it."""

    path: Path
    files: list[Path]


def result_paths(view: RunView) -> list[Path]:
    """Return the intact result files that a browser can save, LoRA files first."""
    return [path for path in _results(view) if path.is_file() and view.run_dir.holds(path)]


def result_folders(view: RunView) -> list[ResultFolder]:
    """Return the intact results that are folders: PEFT adapters and merged models."""
    found = [path for path in _results(view) if path.is_dir() and view.run_dir.holds(path)]
    return [ResultFolder(path, files_in(view.run_dir, path)) for path in found]


def result_folder(view: RunView, path: Path) -> ResultFolder | None:
    """Return a result folder by its path, with all links resolved; None if the run has no such result."""
    return next((folder for folder in result_folders(view) if folder.path.resolve() == path), None)


def peft_folders_by_step(view: RunView) -> dict[int, Path]:
    """Return the intact PEFT folders of a run by their step: exports of earlier steps, and the end of the run."""
    run_dir, found = view.run_dir, dict[int, Path]()
    for folder in result_folders(view):
        if folder.path == run_dir.peft_dir and (updates := updates_of(run_dir)):
            found[updates] = folder.path
        elif step := EARLIER.fullmatch(folder.path.relative_to(run_dir.path).as_posix()):
            found[int(step[1])] = folder.path
    return found


def savable(view: RunView) -> set[Path]:
    """Return all files of a run that a browser can save, with all links resolved."""
    inside = [path for folder in result_folders(view) for path in folder.files]
    return {path.resolve() for path in (*result_paths(view), *inside)}


def sizes_of(paths: Iterable[Path]) -> dict[Path, int]:
    """Return the sizes in bytes of the files that are still there: an export may replace one meanwhile."""
    found = dict[Path, int]()
    for path in paths:
        with contextlib.suppress(OSError):
            found[path] = path.stat().st_size
    return found


def download_name(run_dir: RunDir, path: Path) -> str:
    """Return the name under which a file of a run is saved elsewhere. It begins with the run's name.

    The name of diffusers and names inside of a folder, such as a PEFT adapter, stay, because programs look for them.
    """
    run, folder = run_dir.path.name, path.resolve().parent
    if folder.parent == run_dir.earlier_exports(0).parent.resolve():
        return f"{run}-{folder.name}-{path.name}"
    places = (run_dir.path.resolve(), run_dir.checkpoints.resolve())
    is_kept = folder not in places or path.name in (run_dir.diffusers_lora.name, run_dir.report.name)
    return path.name if is_kept or path.name.startswith(run) else f"{run}-{path.name}"


def files_in(run_dir: RunDir, folder: Path) -> list[Path]:
    """Return the files in a folder of a run and in its folders. Links that leave the run are skipped."""
    found = list[Path]()
    for path in _inside(run_dir, folder):
        below = _inside(run_dir, path) if path.is_dir() else [path]
        found += [each for each in below if each.is_file()]
    return found[:MAX_FILES]


def export_place(run_dir: RunDir, file_format: str, step: int) -> Path | None:
    """Return where an export of a step is written, or None for the usual place in the run.

    The usual place is for the end of a run, or its newest checkpoint while it has no end. A step without a checkpoint
    has no place, because the export refuses it.
    """
    steps = [updates for updates, _ in run_dir.list_checkpoints()]
    if step not in steps or step == (updates_of(run_dir) or max(steps)):
        return None
    return run_dir.earlier_exports(step) / run_dir.export_of(file_format).name


def _results(view: RunView) -> list[Path]:
    try:
        whole = view.files.whole
    except LoraRocmError:
        return []
    return [*whole, *_earlier(view.run_dir)]


def _earlier(run_dir: RunDir) -> Iterator[Path]:
    """Yield what was exported from steps before the end."""
    for folder in _inside(run_dir, run_dir.earlier_exports(0).parent):
        if folder.is_dir():
            yield from _inside(run_dir, folder)


def _inside(run_dir: RunDir, folder: Path) -> list[Path]:
    """Return the first files and folders in a folder of a run, by name; none if it leads out of the run."""
    if not run_dir.holds(folder):
        return []
    try:
        with os.scandir(folder) as listed:
            paths = [Path(each.path) for each in islice(listed, MAX_FILES) if not each.name.startswith(".")]
    except OSError:  # it does not exist, or this user may not read it
        return []
    return sorted(path for path in paths if run_dir.holds(path))
