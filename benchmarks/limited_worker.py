"""The training child under a hard limit of the system on its memory (Linux): for tests and ``reliability.py memory``.

usage: SPARE_BYTES=N python -m benchmarks.limited_worker [arguments of lora_rocm.train.worker]

When training begins, the process may take N bytes of addresses more than it has (RLIMIT_AS); 0: as many as it likes.
What it had then, and the most that it had, is said on standard error.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

from lora_rocm.train import worker
from lora_rocm.train.session import Session

SPARE = "SPARE_BYTES"


def address_bytes(name: str) -> int:
    """VmSize (now) or VmPeak (the most) of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class Limited(Session):
    """Sets the limit when the first step is about to begin."""

    def emit(self, event_type: str, **fields: Any) -> None:
        super().emit(event_type, **fields)
        spare, at = int(os.environ.get(SPARE, "0")), (event_type, fields.get("phase"), fields.get("state"))
        if at == ("phase", "step", "begin"):
            now = address_bytes("VmSize")
            if spare:
                resource.setrlimit(resource.RLIMIT_AS, (now + spare, resource.RLIM_INFINITY))
            print(f"addresses at the first step: {now}", file=sys.stderr, flush=True)
        elif at == ("phase", "step", "end"):
            print(f"addresses at most: {address_bytes('VmPeak')}", file=sys.stderr, flush=True)
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    worker.Session = Limited  # type: ignore[misc]
    sys.exit(worker.main())
