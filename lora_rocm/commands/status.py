"""The status of a run, read from its files."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_rocm.commands.next_command import command_after
from lora_rocm.foundation.units import number_text, rate_text, time_text, times_text
from lora_rocm.model_files.readers import readers_line
from lora_rocm.recipe.saved_recipe import recipe_fault
from lora_rocm.report.figures import progress_of
from lora_rocm.rundir.event_types import (
    AlarmEvent,
    ChangeEvent,
    ErrorEvent,
    ExportEvent,
    IncidentEvent,
    KernelsEvent,
    RestartEvent,
    StartEvent,
)
from lora_rocm.rundir.fork_origin import ForkOrigin
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView
from lora_rocm.telemetry.numbers import long_text


@dataclass(frozen=True)
class RunError:
    """The error with which a run ended.

    Attributes:
        code: stable name of the error.
        what: what happened.
        where: file, line and key with the value, or another place.
        fix: how to fix it.
    """

    code: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True)
class StatusDocument:
    """State and figures of a run.

    Attributes:
        path: the run directory.
        state: running, finished, stopped (on request), failed (with an error, or because it hung), died (without an
            error), or prepared.
        updates: current step.
        max_train_steps: total number of steps, or null if not known yet.
        loss: smoothed loss.
        rate_per_s: steps per second, or null if the run is not running.
        eta_s: seconds left, or null if the run is not running.
        activity: the check of kernels, with a counter, or null if there is none now.
        last_event_s_ago: seconds since the last event.
        incidents: number of faults that the training loop handled.
        restarts: number of restarts of the worker.
        changes: mitigations applied after failures, one entry per application.
        last_checkpoint: newest intact checkpoint.
        telemetry: last readings of each GPU, with the fields of telemetry events and a text.
        alarms: warnings from telemetry, the newest last.
        error: the error with which the run ended, or null.
        files: intact result files.
        readers: programs that read each LoRA file, by its path.
        remarks: sentences about damaged, missing and older files.
        forked_from: parent of a forked run, or null.
        next: the command that continues the run, or shows what a finished one learned. Null for a running one.
    """

    path: Path
    state: str
    updates: int
    max_train_steps: int | None
    loss: float | None
    rate_per_s: float | None
    eta_s: float | None
    activity: str | None
    last_event_s_ago: float | None
    incidents: int
    restarts: int
    changes: list[str]
    last_checkpoint: Path | None
    telemetry: list[dict[str, Any]]
    alarms: list[str]
    error: RunError | None
    files: list[Path]
    readers: dict[str, str]
    remarks: list[str]
    forked_from: ForkOrigin | None = None
    next: str | None = None


def status(run_dir: RunDir) -> StatusDocument:
    """Return state and figures of a run. Its ``files`` and ``last_checkpoint`` exclude files of an earlier step.

    Raises:
        ResumeError: an event file cannot be read.
    """
    # read the state of the run
    view = RunView.of(run_dir)
    files, problem, latest_s = view.files, view.problem, view.latest_s
    progress = progress_of(view)
    readers = {
        str(run_dir.path / event.path): readers_line(event.can_read, event.cannot_read)
        for event in view.all(ExportEvent)
    }
    error = None
    if problem is not None and not view.is_running:
        fix = problem.fix if isinstance(problem, ErrorEvent) else ""
        error = RunError(problem.code, problem.what, problem.where, fix)
    return StatusDocument(
        path=run_dir.path,
        state=view.state,
        activity=_activity(view),
        updates=progress.updates,
        max_train_steps=progress.max_train_steps,
        loss=progress.loss,
        rate_per_s=progress.rate_per_s,
        eta_s=progress.eta_s,
        last_event_s_ago=round(time.time() - latest_s, 1) if latest_s is not None else None,
        incidents=len(view.all(IncidentEvent)),
        restarts=sum(isinstance(event, RestartEvent) for event in view.trouble),
        changes=[event.id for event in view.trouble if isinstance(event, ChangeEvent)],
        last_checkpoint=files.checkpoint.path if files.checkpoint else None,
        telemetry=[{**reading.to_json(), "text": long_text(reading)} for reading in view.readings],
        alarms=[event.text for event in view.supervisor.all(AlarmEvent)],
        error=error,
        files=list(files.whole),
        readers={path: text for path, text in readers.items() if text},
        remarks=[*([fault] if (fault := recipe_fault(run_dir)) else ()), *view.remarks],
        forked_from=view.forked_from,
        next=command_after(run_dir, view.state),
    )


def _activity(view: RunView) -> str | None:
    """Return the kernels that a running run is checking, as text; None if it does not check any."""
    checked, started = view.last(KernelsEvent), view.last(StartEvent)
    if not view.is_running or checked is None or started is None or checked.session != started.session:
        return None
    if not checked.kernel:
        return None
    return f"compiling and checking kernels: {checked.done} of {checked.total} done, now {checked.kernel}"


def status_text(found: StatusDocument) -> str:
    """Return a run's status as text."""
    total = found.max_train_steps
    lines = [
        f"{found.path}: {found.state}",
        f"  step {found.updates}" + (f" of {total}" if total else ""),
        f"  loss {number_text(found.loss)}",
    ]
    if found.forked_from is not None:
        lines.insert(1, f"  forked from {found.forked_from.text}")
    if found.rate_per_s:
        left = f", {time_text(found.eta_s)} left" if found.eta_s is not None else ""
        lines.append(f"  {rate_text(found.rate_per_s)}{left}")
    if found.activity:
        lines.append(f"  {found.activity}")
    if found.last_event_s_ago is not None:
        lines.append(f"  last event {time_text(found.last_event_s_ago)} ago")
    lines += _watched_lines(found)
    if found.incidents:
        lines.append(f"  {found.incidents} incidents, see the report")
    if found.restarts:
        lines.append(f"  started again {times_text(found.restarts)}, see the report")
    if found.changes:
        counts = Counter(found.changes)
        names = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
        lines.append(f"  changed because of failures: {', '.join(names)}")
    if found.error:
        lines.append(f"  error: {found.error.what}")
    lines.append(f"  last checkpoint: {found.last_checkpoint or 'none yet'}")
    lines += _file_lines(found)
    lines += [f"  {remark}" for remark in found.remarks]
    if found.next is not None:
        lines.append(f"next: {found.next}")
    return "\n".join(lines)


def _file_lines(found: StatusDocument) -> list[str]:
    """Return lines with the run's files, and the programs that read them."""
    lines = []
    for path in found.files:
        lines.append(f"  file: {path}")
        if reader := found.readers.get(str(path)):
            lines.append(f"    {reader}")
    return lines


def _watched_lines(found: StatusDocument) -> list[str]:
    """Return lines with the GPU readings of a running run, and its last warning."""
    readings = found.telemetry if found.state == "running" else []
    lines = [f"  GPU {reading['gpu']}: {reading['text']}" for reading in readings]
    return lines + [f"  warning: {text}" for text in found.alarms[-1:]]
