"""Times the rows of a benchmark one by one. A failure, hang or crash affects only its own row."""

from __future__ import annotations

import faulthandler
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lora_rocm.rundir.event_types import BeginEvent, RowEvent
from lora_rocm.rundir.events import emit

REPEATS = {"cuda": 5, "cpu": 3}
MEASURE_S = {"cuda": 0.01, "cpu": 0.004}
"""Minimum duration of one repetition in seconds; shorter ones would be too imprecise."""
MAX_CALLS = 1000
LIMIT_S = 120.0
"""Seconds after which a row counts as hung. The slowest known row is a first convolution, during which its kernel is
built.
"""

Call = Callable[[], object]


@dataclass(frozen=True)
class MeasuredRow:
    """One row of a benchmark, to be measured.

    fields: columns that describe the row, for the table and the file.
    amount: floating-point operations, bytes or samples per call.
    prepare: allocates the inputs and returns the callable to time.
    found: additional results, reported with the row.
    """

    fields: dict[str, Any]
    amount: float
    prepare: Callable[[], Call]
    found: dict[str, Any] = field(default_factory=dict)


def seconds_of(call: Call, device: torch.device) -> float:
    """Return the median time of one call in seconds, after one warm-up call.

    On a GPU it is measured by device events, which exclude launch times that overlap with computation.
    """
    call()
    return _median(lambda calls: _seconds(call, calls, device), device.type)


def _median(timed: Callable[[int], float], kind: str) -> float:
    """Return the median time of one call.

    ``timed`` returns the total time of a number of calls; ``kind`` is the device type.
    """
    calls = min(MAX_CALLS, max(1, round(MEASURE_S[kind] / max(timed(1), 1e-7))))
    return statistics.median(timed(calls) / calls for _ in range(REPEATS[kind]))


def _seconds(call: Call, calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)  # earlier work must not count
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize(device)  # an event has a time only once it has passed
    elapsed_ms: float = first.elapsed_time(last)
    return elapsed_ms / 1e3


def wall_seconds_of(call: Call, devices: Sequence[torch.device]) -> float:
    """Return the median wall time of one call, until every device is done.

    Use it for copies, on which the host may wait.

    Args:
        call: the call to measure.
        devices: all GPUs that the call uses.
    """

    def timed(calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        for device in devices:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    timed(1)
    return _median(timed, "cuda" if devices else "cpu")


def measure(
    works: Sequence[MeasuredRow], start: int, seconds: Callable[[Call], float], limit_s: float = LIMIT_S
) -> None:
    """Measure all rows from number ``start`` on, and emit the results as events.

    A row that fails is emitted with the reason. If a row hangs for ``limit_s`` or leaves the GPU unusable, this process
    ends, and the parent continues with the next row in a new process.
    """
    for number, work in enumerate(works[start:], start):
        emit(BeginEvent(number=number, limit_s=limit_s, fields=work.fields))
        faulthandler.dump_traceback_later(limit_s, exit=True)  # a C thread: ends the process even if a call hangs
        emit(RowEvent(number=number, **work.fields, **_measured(work, seconds), **work.found))
        _clean_up()
        faulthandler.cancel_dump_traceback_later()


def _measured(work: MeasuredRow, seconds: Callable[[Call], float]) -> dict[str, Any]:
    try:
        taken = seconds(work.prepare())
        return {"amount": work.amount, "seconds": taken, "per_second": work.amount / taken, "problem": None}
    except RuntimeError as error:  # also torch.OutOfMemoryError; an unsupported backend raises it, too
        problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return {"amount": work.amount, "seconds": None, "per_second": None, "problem": problem[:300]}


def _clean_up() -> None:
    """Free the row's memory. Exit if the GPU no longer works, because every later row would fail too."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        sys.exit(1)
    torch.cuda.empty_cache()
