"""Counts the processor cores that this process may use."""

from __future__ import annotations

import os

import psutil

from lora_rocm.hardware.probe.linux_probe import container_cores
from lora_rocm.hardware.probe.sources import ProbeReads, Sources, this_machine


def core_count(sources: Sources | None = None) -> int:
    """Return the number of cores for threads and processes: at least 1.

    ``os.cpu_count`` counts the machine's cores, also if a container or ``taskset`` allows fewer. Threads that outnumber
    the allowed cores wait for each other.

    ``sources``: replacement for the machine's own sources in tests.
    """
    sources = sources or this_machine()
    container = container_cores(ProbeReads(sources)) if sources.system == "linux" else None
    return max(1, min(sources.cpu_count, _allowed(), sources.cpu_count if container is None else container))


def _allowed() -> int:
    """Return the number of cores in the process's affinity mask."""
    try:
        return len(psutil.Process().cpu_affinity() or ()) or (os.cpu_count() or 1)
    except (AttributeError, psutil.Error, OSError):  # macOS has none
        return os.cpu_count() or 1
