"""List the runs in a folder."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import number_text, size_text
from lora_rocm.report.figures import Figures
from lora_rocm.rundir.disk_space import bytes_in
from lora_rocm.rundir.fork_origin import ForkOrigin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run, written_s
from lora_rocm.rundir.recipe_family import family_in
from lora_rocm.rundir.run_view import RunView
from lora_rocm.supervisor.manage_runs import RunChange, archive_run, delete_run, rename_run

DAY = "%Y-%m-%d %H:%M"
LAST_STEPS = 400
"""Number of steps that are read of each run. Older ones have a weight of 5e-6 in the smoothed loss."""


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
        family: model family of its recipe, or null if unknown.
        last_loss: loss of the last step, or null if unknown.
        disk_bytes: size of all its files.
        forked_from: parent of a forked run, or null.
    """

    name: str
    path: Path
    state: str
    updates: int | None = None
    max_train_steps: int | None = None
    loss: float | None = None
    last_event_s: float | None = None
    problem: str | None = None
    family: str | None = None
    last_loss: float | None = None
    disk_bytes: int = 0
    forked_from: ForkOrigin | None = None


@dataclass(frozen=True)
class RunsResult:
    """The runs in a folder.

    Attributes:
        runs: the runs, the one with the newest event last; empty if the command changed runs.
        changes: the runs that this command renamed, archived or deleted.
    """

    runs: tuple[ListedRun, ...]
    changes: tuple[RunChange, ...] = ()


@dataclass(frozen=True)
class RunFilter:
    """The runs that a user wants to see.

    Attributes:
        states: states of runs; empty for all.
        families: model families; empty for all.
        name: pattern of names with * and ?, or None for all.
        last: number of runs, the newest ones, or None for all.
    """

    states: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    name: str | None = None
    last: int | None = None


@dataclass(frozen=True)
class RunChanges:
    """The changes that a user wants. Runs are paths, or names in the folder of the runs.

    Attributes:
        rename: a run and its new name, or None.
        archive: runs to archive.
        delete: runs to delete.
        dry_run: whether nothing is changed, and only the freed space is computed.
    """

    rename: tuple[str, str] | None = None
    archive: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    dry_run: bool = False


def changed(folder: Path, wanted: RunChanges) -> tuple[RunChange, ...]:
    """Rename, archive and delete runs, in this order. It ends at the first run that is refused.

    Raises:
        UserError: there is no such run, it is running, or a name is taken or invalid.
        StorageError: a run cannot be changed, or is a link.
    """

    def place(run: str) -> Path:
        return folder / run if is_run(folder / run) else Path(run)

    found = []
    if wanted.rename is not None:
        found.append(rename_run(place(wanted.rename[0]), wanted.rename[1], dry_run=wanted.dry_run))
    found += [archive_run(place(run), dry_run=wanted.dry_run) for run in wanted.archive]
    found += [delete_run(place(run), dry_run=wanted.dry_run) for run in wanted.delete]
    return tuple(found)


def runs(folder: Path, wanted: RunFilter | None = None) -> RunsResult:
    """Return the runs in a folder. If the folder is itself a run, return only that one.

    Args:
        folder: a folder with runs, or a run directory.
        wanted: the runs to return, or None for all.

    Raises:
        UserError: there is no such folder.
    """
    wanted = wanted or RunFilter()
    if not folder.is_dir():
        fix = "Give the folder that runs are written to (output.dir of the recipe)."
        raise UserError("no-folder", "There is no such folder.", where=str(folder), fix=fix)
    places = [folder] if RunDir(folder.absolute()).holds_run() else sorted(folder.iterdir())
    # names, families and times are read quickly
    named = (RunDir(place.absolute()) for place in places if fnmatch.fnmatch(place.name, wanted.name or "*"))
    families = {run_dir: family_in(run_dir.recipe) for run_dir in named if is_run(run_dir.path)}
    chosen = [each for each, family in families.items() if not wanted.families or family in wanted.families]
    if wanted.last is not None and not wanted.states:
        chosen = sorted(chosen, key=written_s)[-wanted.last :]
    # read their events
    found = [listed_run(run_dir, families[run_dir]) for run_dir in chosen]
    found = [run for run in found if not wanted.states or run.state in wanted.states]
    found.sort(key=lambda run: run.last_event_s or 0.0)
    return RunsResult(tuple(found[-wanted.last :] if wanted.last is not None else found))


def listed_run(run_dir: RunDir, family: str | None) -> ListedRun:
    """Return one run as in the list. ``family``: the model family of its recipe, or None."""
    path, num_bytes = run_dir.path, bytes_in(run_dir.path)
    try:
        view = RunView.of(run_dir, last_steps=LAST_STEPS)
    except LoraRocmError as error:  # the other runs are still listed
        return ListedRun(path.name, path, "unreadable", problem=error.what, family=family, disk_bytes=num_bytes)
    losses = view.steps.real["loss"]
    return ListedRun(
        path.name,
        path,
        view.state,
        view.updates,
        view.max_train_steps,
        Figures.of(view).loss.value,
        view.latest_s,
        view.problem.what if view.problem is not None and not view.is_running else None,
        family,
        losses[-1] if losses else None,
        num_bytes,
        view.forked_from,
    )


def render(result: RunsResult) -> str:
    """Return the changes, or else the list as a table."""
    if result.changes:
        return "\n".join(map(_change_text, result.changes))
    rows: list[tuple[str, ...]] = [("name", "family", "state", "step", "loss", "last loss", "disk", "last event")]
    for run in result.runs:
        of = "" if run.max_train_steps is None else f" of {run.max_train_steps}"
        step = "-" if run.updates is None else f"{run.updates}{of}"
        when = "-" if run.last_event_s is None else time.strftime(DAY, time.localtime(run.last_event_s))
        losses = (number_text(run.loss), number_text(run.last_loss))
        rows.append((run.name, run.family or "-", run.state, step, *losses, size_text(run.disk_bytes), when))
    if any(run.forked_from is not None for run in result.runs):
        origins = [run.forked_from for run in result.runs]
        parents = [f"{legible(each.run.name)}, step {each.step}" if each else "-" for each in origins]
        rows = [(*row, origin) for row, origin in zip(rows, ["forked from", *parents], strict=True)]
    return _table(rows) if result.runs else "There are no runs here."


def _change_text(change: RunChange) -> str:
    would = "" if change.is_done else "would be "
    to = f": {change.now}" if change.now is not None else ""
    freed = f" ({size_text(change.freed_bytes)} freed)" if change.freed_bytes else ""
    return f"{change.run} {would}{change.action}{to}{freed}"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
