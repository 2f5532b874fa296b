"""Runs a child process that measures rows. If a row crashes or hangs, a new process continues with the next row."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lora_rocm.errors import WorkerDiedError
from lora_rocm.foundation.files import temporary_folder
from lora_rocm.processes.jobs import CHILDREN, RowsJob, name_of
from lora_rocm.processes.process import OnEvent
from lora_rocm.processes.tool import run_tool, write_job
from lora_rocm.rundir.event_types import BeginEvent, Event, RowEvent

Row = dict[str, Any]
"""Results of one measurement, by name."""
MAX_DEATHS = 5
"""Number of crashed or hung child processes after which the measurement stops."""
GRACE_S = 15.0
"""Extra time after a row's time limit, at which a child ends itself. After that the parent kills the child."""


def run_rows(
    job: RowsJob,
    env: Mapping[str, str],
    on_row: Callable[[Row], None],
    on_event: OnEvent = lambda event: None,
    start_limit_s: float = math.inf,
    module: str | None = None,
    require_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Run a measuring job, and pass each row to ``on_row``. ``problem`` of a row is the reason why it failed, or None.

    Args:
        job: the child's job. ``start`` is set for each new process.
        env: the child's environment.
        on_row: called with the fields of each row.
        on_event: called with each other event.
        start_limit_s: time limit for the start of the child, until its first row begins.
        module: replaces the module of the child.
        require_wanted: is called regularly. If it raises an error, the child is killed.

    Raises:
        LoraRocmError: the child reported this error.
        WorkerDiedError: a child ended before its first row, or too many children ended early.
    """
    begun: BeginEvent | None = None
    begun_at_s, deadline = 0.0, math.inf
    rows = deaths = 0

    def receive(event: Event) -> None:
        nonlocal begun, begun_at_s, rows, deadline
        match event:
            case BeginEvent():
                begun, begun_at_s = event, time.monotonic()
                deadline = begun_at_s + event.limit_s + GRACE_S
            case RowEvent():
                rows, deadline = event.number + 1, math.inf
                on_row(fields_of(event))
            case _:
                on_event(event)

    def is_late() -> bool:
        require_wanted()
        return time.monotonic() > deadline

    # A child that dies loses its current row; the next child starts at the row after it
    with temporary_folder() as folder:
        while True:
            path = write_job(folder, replace(job, start=rows))
            deadline = time.monotonic() + start_limit_s
            try:
                run_tool(module or CHILDREN[name_of(job)].module, [str(path)], env, receive, is_late)
                return
            except WorkerDiedError as error:
                deaths += 1
                if begun is None or deaths >= MAX_DEATHS:
                    raise
                if rows <= begun.number:
                    rows = begun.number + 1
                    on_row(_died(begun, time.monotonic() - begun_at_s, error))


def _died(begun: BeginEvent, after_s: float, error: WorkerDiedError) -> Row:
    """Return the row during which the child ended. ``after_s``: seconds since the row began."""
    hung = after_s >= begun.limit_s
    how = f"did not end in {begun.limit_s:g} s" if hung else f"ended the process: {how_it_died(error)}"
    return {**begun.fields, "amount": None, "seconds": None, "per_second": None, "problem": how}


def how_it_died(error: WorkerDiedError) -> str:
    """Return the reason in the first line of the error, such as "killed by signal SIGSEGV"."""
    return error.what.splitlines()[0].partition("saying why: ")[2].rstrip(".") or error.what


def fields_of(event: Event) -> Row:
    """Return an event's fields, without the fields that all events have."""
    return {key: value for key, value in event.to_json().items() if key not in ("type", "number")}
