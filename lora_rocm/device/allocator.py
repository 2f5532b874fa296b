"""The allocator of the device: its budget, its limit, and its usage."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from lora_rocm.hardware.memory_budget import GIB, host_reserve
from lora_rocm.rules.rule import release

FRACTION_OF_PROPERTIES_FROM = (2, 10)
"""From this torch on a memory fraction refers to the properties' total, before to the total of mem_get_info."""

FRAGMENTED_SHARE = 0.2
"""Share of the memory held by torch; an estimate. If more than this is unused when memory runs out, the pool is
fragmented: whole unused segments were returned before the error (c10/cuda/CUDACachingAllocator.cpp).
"""


@dataclass(frozen=True)
class Usage:
    """Bytes that torch's allocator holds on a GPU: for tensors, and in total."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmented(self) -> bool:
        """After an out-of-memory error: whether enough memory is held, but in pieces."""
        return self.reserved_bytes - self.allocated_bytes > FRAGMENTED_SHARE * self.reserved_bytes

    def __str__(self) -> str:
        return f"{self.allocated_bytes / GIB:.2f} GiB in tensors, {self.reserved_bytes / GIB:.2f} GiB held"


def usage(device: torch.device) -> Usage | None:
    """The current usage of a device; None for the CPU, whose memory torch does not pool."""
    if device.type != "cuda":
        return None
    return Usage(int(torch.cuda.memory_allocated(device)), int(torch.cuda.memory_reserved(device)))


def empty_pools() -> None:
    """Return torch's unused memory to the device, which also joins free neighbouring pieces, and its pinned memory.

    Call it between phases, whose tensors differ in size.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        # torch 2.11 has the first name alone, later versions both
        release_pinned = getattr(torch._C, "_host_emptyCache", None) or torch.accelerator.empty_host_cache
        release_pinned()


def device_budget(device: torch.device) -> int:
    """Bytes that tensors may take on a GPU, by what torch and the system report now.

    The two totals of a ROCm APU may differ (carve-out or GTT), and reported free memory may be too high. So it is the
    smaller total, and for an APU on Linux at most what it can take from the system.
    """
    properties = torch.cuda.get_device_properties(device)
    limits = [int(properties.total_memory), torch.cuda.mem_get_info(device)[1]]
    if sys.platform == "linux" and getattr(properties, "is_integrated", False):
        memory = psutil.virtual_memory()
        limits.append(max(0, memory.available - host_reserve(memory.total)))
    return min(limits)


def limit(device: torch.device, limit_bytes: int | None) -> int | None:
    """Make torch's allocator raise ``torch.OutOfMemoryError`` beyond ``limit_bytes`` in this process.

    Returns:
        The limit in bytes, or None if none was set: on the CPU, none asked for, or not below the total that torch
            counts (a fraction of less than the limit must never be set, because an APU may report only its carve-out).
    """
    if device.type != "cuda" or limit_bytes is None:
        return None
    if release(torch.__version__) >= FRACTION_OF_PROPERTIES_FROM:
        whole = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        whole = torch.cuda.mem_get_info(device)[1]
    if limit_bytes >= whole:
        return None
    number = torch.cuda.current_device() if device.index is None else device.index  # needs an explicit index
    torch.cuda.set_per_process_memory_fraction(limit_bytes / whole, number)
    return limit_bytes


@contextmanager
def afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Run ``act`` at the end of a ``with`` block, however the block ends.

    If the block failed, errors of ``act`` are suppressed: on a lost GPU every call fails, and the first error counts.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        with suppress(*((RuntimeError,) if failed else ())):
            act()
