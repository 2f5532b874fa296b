"""Timing rows of a benchmark, one after the other, so that one that fails, hangs or crashes spoils no other."""

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
"""Each repetition takes at least so long, so that clocks are exact enough."""
MAX_CALLS = 1000
LIMIT_S = 120.0
"""A row that takes longer hangs. The slowest that is known to end is a first convolution while its kernel is built."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """One row to measure.

    fields: what the row is about, for table and file. amount: floating point operations, bytes or samples of one call.
    prepare: allocates, and returns the call to be timed. found: what else it found, told with the row.
    """

    fields: dict[str, Any]
    amount: float
    prepare: Callable[[], Call]
    found: dict[str, Any] = field(default_factory=dict)


def seconds_of(call: Call, device: torch.device) -> float:
    """Median time of one call, after warming up; on a GPU by device events, so launching costs nothing it hides."""
    call()
    return _median(lambda calls: _seconds(call, calls, device), device.type)


def _median(timed: Callable[[int], float], kind: str) -> float:
    """Median time of one call; ``timed`` takes how many calls to make."""
    calls = min(MAX_CALLS, max(1, round(MEASURE_S[kind] / max(timed(1), 1e-7))))
    return statistics.median(timed(calls) / calls for _ in range(REPEATS[kind]))


def _seconds(call: Call, calls: int, device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - started
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(calls):
        call()
    last.record()
    torch.cuda.synchronize(device)
    elapsed_ms: float = first.elapsed_time(last)
    return elapsed_ms / 1e3


def wall_seconds_of(call: Call, devices: Sequence[torch.device]) -> float:
    """Median time of one call as the host sees it: until every device is done. For copies, which the host may wait for.

    Args:
        call: what is measured.
        devices: GPUs that take part.
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


def measure(works: Sequence[Work], start: int, seconds: Callable[[Call], float], limit_s: float = LIMIT_S) -> None:
    """Measure the rows from ``start`` on, as events.

    What fails is a row that says why. A hang ends the process, and so does a GPU that a row left unusable: the parent
    goes on after that row in a new one.
    """
    for number, work in enumerate(works[start:], start):
        emit(BeginEvent(number=number, limit_s=limit_s, fields=work.fields))
        faulthandler.dump_traceback_later(limit_s, exit=True)  # a thread of C: it ends us even in a call that hangs
        emit(RowEvent(number=number, **work.fields, **_measured(work, seconds), **work.found))
        _clean_up()
        faulthandler.cancel_dump_traceback_later()


def _measured(work: Work, seconds: Callable[[Call], float]) -> dict[str, Any]:
    try:
        taken = seconds(work.prepare())
        return {"amount": work.amount, "seconds": taken, "per_second": work.amount / taken, "problem": None}
    except RuntimeError as error:  # also torch.OutOfMemoryError; a backend that does not do this says so
        problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return {"amount": work.amount, "seconds": None, "per_second": None, "problem": problem[:300]}


def _clean_up() -> None:
    """Give back the row's memory; leave where the GPU no longer answers, because every row after it would fail too."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        sys.exit(1)
    torch.cuda.empty_cache()
