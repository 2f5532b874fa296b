"""The runs in a folder, as a list."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.units import number_text
from lora_rocm.report.figures import Figures
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView

DAY = "%Y-%m-%d %H:%M"


def runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs in a folder (or the run that it is), the one with the newest event last, ready for JSON.

    Of each: name, path, state (``RunView``, or unreadable), updates, max_train_steps, loss (smoothed), last_event_s
    (seconds since the epoch), and problem: why it failed or cannot be read. What is not known is None.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        fix = "Give the folder that runs are written to (output.dir of the recipe)."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    places = [folder] if RunDir(folder.absolute()).holds_run() else sorted(folder.iterdir())
    found = [_run(run_dir) for run_dir in (RunDir(place.absolute()) for place in places) if _is_run(run_dir)]
    return sorted(found, key=lambda run: run["last_event_s"] or 0.0)


def _is_run(run_dir: RunDir) -> bool:
    try:
        return run_dir.path.is_dir() and run_dir.holds_run()
    except OSError:  # a folder of somebody else
        return False


def _run(run_dir: RunDir) -> dict[str, Any]:
    found = dict.fromkeys(("updates", "max_train_steps", "loss", "last_event_s", "problem"))
    found = {"name": run_dir.path.name, "path": str(run_dir.path), "state": "unreadable", **found}
    try:
        view = RunView.of(run_dir)
    except LoraRocmError as error:  # the other runs are still listed
        return {**found, "problem": error.what}
    return {
        **found,
        "state": view.state,
        "updates": view.updates,
        "max_train_steps": view.max_train_steps,
        "loss": Figures.of(view).loss.value,
        "last_event_s": view.latest_s,
        "problem": view.problem.what if view.problem is not None and not view.is_running else None,
    }


def runs_text(found: list[dict[str, Any]]) -> str:
    """Return ``runs`` as a table."""
    rows = [("name", "state", "step", "loss", "last event")]
    for run in found:
        of = "" if run["max_train_steps"] is None else f" of {run['max_train_steps']}"
        step = "-" if run["updates"] is None else f"{run['updates']}{of}"
        last_s = run["last_event_s"]
        when = "-" if last_s is None else time.strftime(DAY, time.localtime(last_s))
        rows.append((run["name"], run["state"], step, number_text(run["loss"]), when))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines) if found else "There are no runs here."
