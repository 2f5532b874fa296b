"""Child process that lists a step's kernels and counts its memory, while the training process starts.

It imports what it needs, then waits for a request on standard input (``processes.start_jobs.CountRequest``). It writes
the launches of the step's kernels to standard output, and then the memory into the footprint cache. It ends when it has
counted, or when its standard input closes.

With a ``RecomputedJob`` it only counts the passes that recompute blocks, and writes the result to standard output. The
parent sends the result on to the first process, which waits for it on standard input (``memory.footprint_process``).
"""

from __future__ import annotations

import os
import sys
import threading
from queue import Queue

import torch

from lora_rocm.checks.kernel_check import CANNOT
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.hardware.settings import VARIABLE, settings_from
from lora_rocm.memory.footprint import count_recomputed, counted, largest_of, meta_model
from lora_rocm.memory.step_launches import launches_of_step
from lora_rocm.processes.jobs import count_request, job_of, request_line
from lora_rocm.processes.start_jobs import CountJob, CountRequest, RecomputedCount, RecomputedJob, StepLaunches
from lora_rocm.recipe.load import load_recipe  # recipe: only read, to count its memory
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

ORPHANED_CODE = FAILED_CODE = 1
IMPORTS_MORE = True
"""Garbage collection stays disabled (``foundation.packages.imported``). It would take a tenth of the time, and free
nothing: the counts are the same with it and without.
"""
KINDS: tuple[type[CountJob | RecomputedJob], ...] = (CountJob, RecomputedJob)


def main() -> int:
    """List and count what standard input asks for, and return the exit code.

    After an error it writes one line to the log. The start has the same error when it checks the base or counts by
    itself, and reports it with its traceback.
    """
    try:
        job = job_of(*KINDS)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    try:
        return _answered(job)
    except (LoraRocmError, *CANNOT) as error:  # it is asked before the base is checked
        _note("the memory of a step", error)
        return error.exit_code if isinstance(error, LoraRocmError) else FAILED_CODE


def _answered(job: CountJob | RecomputedJob) -> int:
    """Wait for the request, list and count; return the exit code.

    Raises:
        LoraRocmError: recipe or base model cannot be used.
        RuntimeError: the base cannot compute, because its sizes do not fit.
    """
    torch.set_num_threads(1)
    recipe = load_recipe(job.recipe).recipe
    family = family_for(recipe)
    lines = Queue[bytes]()
    threading.Thread(target=_read_requests, args=(lines,), daemon=True, name="parent-watch").start()
    request = count_request(lines.get())
    assert isinstance(request, CountRequest), "the first request of both jobs"
    dtype, settings = getattr(torch, request.dtype), settings_from({VARIABLE: request.settings})
    model, shape = meta_model(family, recipe, dtype, settings.triton), largest_of(recipe)
    if isinstance(job, RecomputedJob):
        _write(count_recomputed(family, model, shape, settings.attention == "math"))
        return 0
    if settings.triton:
        _write(_launches(family, model, recipe))
    counted(recipe, family, dtype, settings, shape, model=model, recomputed=lambda: _other(lines, job.is_shared))
    return 0


def _other(lines: Queue[bytes], is_shared: bool) -> RecomputedCount | None:
    """Wait for the count of the other process. Return None if there is no other process, or it has failed."""
    found = count_request(lines.get()) if is_shared else None
    return found if isinstance(found, RecomputedCount) else None


def _write(answer: StepLaunches | RecomputedCount) -> None:
    sys.stdout.buffer.write(request_line(answer))
    sys.stdout.buffer.flush()


def _launches(family: ModelFamily, model: LoadedModel, recipe: Recipe) -> StepLaunches:
    """Return a step's launches, or none after an error, which is only noted: the step then compiles its kernels."""
    try:
        return launches_of_step(family, model, recipe)
    except (LoraRocmError, *CANNOT) as error:
        _note("the kernels of a step", error)
        return StepLaunches([], [])


def _note(what: str, error: Exception) -> None:
    """Write one line to the log."""
    text = error.code if isinstance(error, LoraRocmError) else " ".join(str(error).split())
    sys.stderr.write(f"no process lists {what}: {type(error).__name__}: {text}\n")


def _read_requests(lines: Queue[bytes]) -> None:
    """Read requests, one a line, until standard input closes. Exit then: nobody waits for the result."""
    text = b""
    while more := os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would be held at interpreter exit
        *whole, text = (text + more).split(b"\n")
        for line in whole:
            lines.put(line)
    os._exit(ORPHANED_CODE)
