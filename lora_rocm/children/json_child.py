"""The main function of child processes that answer with one JSON object (``processes.tool.ask``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TypeVar

from lora_rocm.device.torch_errors import machine_error
from lora_rocm.errors import LoraRocmError
from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import job_of

J = TypeVar("J")


def answer(kind: type[J], found_of: Callable[[J], object]) -> int:
    """Read the job, print the result of ``found_of(job)`` as one JSON object, and return the exit code.

    If there is an error, an error event is printed instead of the result.
    """
    problem: LoraRocmError | None = None
    try:
        found = to_json(found_of(job_of(kind)))
    except LoraRocmError as error:
        problem = error
    except (RuntimeError, MemoryError) as error:  # another process may have filled the GPU
        problem = machine_error(error)
        if problem is None:
            raise
    if problem is not None:
        found = {"type": "error", **problem.to_event()}
    sys.stdout.write(json.dumps(found) + "\n")
    return problem.exit_code if problem is not None else 0
