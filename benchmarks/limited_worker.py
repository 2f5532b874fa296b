"""The training worker under a hard system limit of its memory (Linux), for tests and ``reliability.py memory``.

usage: SPARE_BYTES=N python -m benchmarks.limited_worker [arguments of lora_rocm.train.worker]

When training begins, the process may use at most N more bytes of address space (RLIMIT_AS); 0: no limit.
"""

from __future__ import annotations

import os
import sys

import psutil

from lora_rocm.rundir.event_types import Event, PhaseEvent
from lora_rocm.train import worker
from lora_rocm.train.session import Session

SPARE = "SPARE_BYTES"
PRECISE = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
    "OMP_NUM_THREADS": "1",
}
"""Variables that make freed memory return to the system at once, so that the limit counts only memory in use."""


class Limited(Session):
    """Sets the limit before the first step, and lifts it after the last."""

    def emit(self, event: Event) -> None:
        super().emit(event)
        spare = int(os.environ.get(SPARE, "0"))
        if spare and isinstance(event, PhaseEvent) and event.phase == "step":
            this = psutil.Process()
            most = this.memory_info().vms + spare if event.state == "begin" else psutil.RLIM_INFINITY
            this.rlimit(psutil.RLIMIT_AS, (most, psutil.RLIM_INFINITY))


def main() -> int:
    """Run the worker under the limit."""
    worker.Session = Limited  # type: ignore[misc]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
