"""Reads the main memory that this process can still take."""

from __future__ import annotations

import psutil

from lora_rocm.hardware.probe.linux_probe import container_memory
from lora_rocm.hardware.probe.sources import ProbeReads, Sources, this_machine


def free_main_bytes(sources: Sources | None = None) -> int:
    """Return the bytes of main memory that are available now, at most what the container's limit leaves.

    The system ends a process that exceeds the limit, even if the machine has more memory.

    ``sources``: replacement for the machine's own sources in tests.
    """
    available = int(psutil.virtual_memory().available)
    sources = sources or this_machine()
    container = container_memory(ProbeReads(sources)) if sources.system == "linux" else None
    return available if container is None else min(available, container[1])
