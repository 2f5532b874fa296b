"""Child process that counts a step's memory into the footprint cache, while the training process starts.

It imports what it needs, then waits for a request on standard input (``processes.jobs.CountRequest``). It ends when it
has counted, or when its standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading

import torch

from lora_rocm.errors import LoraRocmError
from lora_rocm.families.base import family_for
from lora_rocm.hardware.settings import VARIABLE, settings_from
from lora_rocm.memory.footprint import counted, largest_of
from lora_rocm.processes.jobs import CountJob, count_request, job_of
from lora_rocm.recipe.load import load_recipe  # recipe: only read, to count its memory
from lora_rocm.rundir.event_types import ErrorEvent
from lora_rocm.rundir.events import emit

ORPHANED_CODE = 1


def main() -> int:
    """Count what standard input asks for, and return the exit code.

    Raises:
        LoraRocmError: recipe or base model cannot be used. Loading has the same error, and reports it.
    """
    try:
        job = job_of(CountJob)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
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
    settings = settings_from({VARIABLE: request.settings})
    counted(recipe, family, getattr(torch, request.dtype), settings, largest_of(recipe))
    return 0


def _leave_with_parent() -> None:
    """Exit when standard input closes: nobody waits for the result then."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED_CODE)
