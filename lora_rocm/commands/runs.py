"""List the runs in a folder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.units import number_text
from lora_rocm.report.figures import Figures
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView

DAY = "%Y-%m-%d %H:%M"


@dataclass(frozen=True)
class ListedRun:
    """One run.

    Attributes:
        name: name of the run directory.
        path: the run directory.
        state: state as in `status`, or unreadable.
        updates: current step, or null if unknown.
        max_train_steps: total number of steps, or null if unknown.
        loss: smoothed loss, or null if unknown.
        last_event_s: time of the last event in seconds since the epoch, or null if there is none.
        problem: why the run failed or cannot be read, or null.
    """

    name: str
    path: Path
    state: str
    updates: int | None = None
    max_train_steps: int | None = None
    loss: float | None = None
    last_event_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class RunsResult:
    """The runs in a folder.

    Attributes:
        runs: the runs, the one with the newest event last.
    """

    runs: tuple[ListedRun, ...]


def runs(folder: Path) -> RunsResult:
    """Return the runs in a folder. If the folder is itself a run, return only that one.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        fix = "Give the folder that runs are written to (output.dir of the recipe)."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    places = [folder] if RunDir(folder.absolute()).holds_run() else sorted(folder.iterdir())
    found = [_run(run_dir) for run_dir in (RunDir(place.absolute()) for place in places) if _is_run(run_dir)]
    return RunsResult(tuple(sorted(found, key=lambda run: run.last_event_s or 0.0)))


def _is_run(run_dir: RunDir) -> bool:
    try:
        return run_dir.path.is_dir() and run_dir.holds_run()
    except OSError:  # no permission to open the folder
        return False


def _run(run_dir: RunDir) -> ListedRun:
    try:
        view = RunView.of(run_dir)
    except LoraRocmError as error:  # the other runs are still listed
        return ListedRun(run_dir.path.name, run_dir.path, "unreadable", problem=error.what)
    return ListedRun(
        run_dir.path.name,
        run_dir.path,
        view.state,
        view.updates,
        view.max_train_steps,
        Figures.of(view).loss.value,
        view.latest_s,
        view.problem.what if view.problem is not None and not view.is_running else None,
    )


def render(result: RunsResult) -> str:
    """Return the list as a table."""
    rows = [("name", "state", "step", "loss", "last event")]
    for run in result.runs:
        of = "" if run.max_train_steps is None else f" of {run.max_train_steps}"
        step = "-" if run.updates is None else f"{run.updates}{of}"
        when = "-" if run.last_event_s is None else time.strftime(DAY, time.localtime(run.last_event_s))
        rows.append((run.name, run.state, step, number_text(run.loss), when))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines) if result.runs else "There are no runs here."
