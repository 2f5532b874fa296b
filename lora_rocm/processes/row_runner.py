"""Runs a heavy child that measures row by row. If a row ends the child, or hangs, a new child continues after it."""

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
"""Measurements of a child, by name."""
MAX_DEATHS = 5
"""The limit of rows that may end the child process before the measurement stops."""
GRACE_S = 15.0
"""A child ends itself at a row's limit; after this much longer it is killed."""


def run_rows(
    job: RowsJob,
    env: Mapping[str, str],
    on_row: Callable[[Row], None],
    on_event: OnEvent = lambda event: None,
    start_limit_s: float = math.inf,
    module: str | None = None,
) -> None:
    """Pass each row to ``on_row``; ``problem`` is None, or the reason why it was not measured.

    Args:
        job: the child's job; ``start`` is set again for each start.
        env: the child's environment.
        on_row: gets the fields of each row.
        on_event: gets the child's other events.
        start_limit_s: the child has to begin its first row within this time.
        module: replaces the module of the job's child.

    Raises:
        LoraRocmError: the error that the child reported.
        WorkerDiedError: the child ended before its first row, or too often.
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
    """The row that ended the child process, after ``after_s`` seconds."""
    hung = after_s >= begun.limit_s
    how = f"did not end in {begun.limit_s:g} s" if hung else f"ended the process: {how_it_died(error)}"
    return {**begun.fields, "amount": None, "seconds": None, "per_second": None, "problem": how}


def how_it_died(error: WorkerDiedError) -> str:
    """The reason from the first line of the error: "killed by signal SIGSEGV"."""
    return error.what.splitlines()[0].partition("saying why: ")[2].rstrip(".") or error.what


def fields_of(event: Event) -> Row:
    """An event's own fields, without those that all events have."""
    return {key: value for key, value in event.to_json().items() if key not in ("type", "number")}
