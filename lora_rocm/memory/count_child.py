"""Child process that lists a step's kernels and counts its memory, while the training process starts.

It imports what it needs, then waits for a request on standard input (``processes.jobs.CountRequest``). It writes the
launches of the step's kernels to standard output, and then the memory into the footprint cache. It ends when it has
counted, or when its standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from lora_rocm.checks.kernel_check import CANNOT
from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.hardware.settings import VARIABLE, settings_from
from lora_rocm.memory.footprint import counted, largest_of, meta_model
from lora_rocm.memory.step_launches import launches_of_step
from lora_rocm.processes.jobs import CountJob, StepLaunches, count_request, job_of, request_line
from lora_rocm.recipe.load import load_recipe  # recipe: only read, to count its memory
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

ORPHANED_CODE = FAILED_CODE = 1


def main() -> int:
    """List and count what standard input asks for, and return the exit code.

    After an error it writes one line to the log. The start has the same error when it checks the base or counts by
    itself, and reports it with its traceback.
    """
    try:
        job = job_of(CountJob)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    try:
        return _answered(job)
    except (LoraRocmError, *CANNOT) as error:  # it is asked before the base is checked
        _note("the memory of a step", error)
        return error.exit_code if isinstance(error, LoraRocmError) else FAILED_CODE


def _answered(job: CountJob) -> int:
    """Wait for the request, list and count; return the exit code.

    Raises:
        LoraRocmError: recipe or base model cannot be used.
        RuntimeError: the base cannot compute, because its sizes do not fit.
    """
    torch.set_num_threads(1)
    recipe = load_recipe(job.recipe).recipe
    family = family_for(recipe)
    text = b""
    while not text.endswith(b"\n"):  # unbuffered: a buffer's lock would be held at interpreter exit
        if not (more := os.read(sys.stdin.fileno(), 4096)):
            return ORPHANED_CODE
        text += more
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent-watch").start()
    request = count_request(text)
    dtype, settings = getattr(torch, request.dtype), settings_from({VARIABLE: request.settings})
    model = meta_model(family, recipe, dtype, settings.triton)
    if settings.triton:
        sys.stdout.buffer.write(request_line(_launches(family, model, recipe)))
        sys.stdout.buffer.flush()
    counted(recipe, family, dtype, settings, largest_of(recipe), model=model)
    return 0


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


def _leave_with_parent() -> None:
    """Exit when standard input closes: nobody waits for the result then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED_CODE)
