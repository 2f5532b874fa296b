"""Child of ``lora-rocm bench transfer`` and ``compute``: ``python -m lora_rocm.children.bench.device_child JOB.json``.

Reports measurements as events, one JSON object per line of standard output: ``machine`` once, then for each row
``begin`` before and ``row`` after. A row that hangs or crashes ends the process; the parent knows which row it was, and
continues after it.
"""

from __future__ import annotations

import os
import sys

from lora_rocm.children.bench import compute, copies
from lora_rocm.children.measuring import machine, told
from lora_rocm.children.tune.job import RecipeWork
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes.jobs import ComputeJob, TransferJob, job_of
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.rundir.event_types import MachineEvent
from lora_rocm.rundir.events import emit


def main() -> int:
    """Do the job. An unexpected error ends in a traceback on standard error, which the parent reads."""
    return told(_measure)


def _measure() -> None:
    job, settings = job_of(TransferJob, ComputeJob), settings_from(os.environ)
    if isinstance(job, ComputeJob):
        work = RecipeWork.of(recipe_from(job.recipe))
        emit(MachineEvent(**machine(work.device, settings)))
        compute.run(work, job.start)
        return
    device = choose_device("auto")
    apply(settings, device)  # same settings as in training
    emit(MachineEvent(**machine(device, settings)))
    copies.run(device, job.start)


if __name__ == "__main__":
    sys.exit(main())
