"""The memory of the device in hand: what tensors may take, a limit that makes a full one raise, and what is taken."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from lora_rocm.host.memory import GIB, host_reserve
from lora_rocm.host.quirks import release

FRACTION_OF_PROPERTIES_FROM = (2, 10)
"""From this torch on a memory fraction is a part of the properties' total, before of the total of mem_get_info."""

FRAGMENTED_SHARE = 0.2
"""Of what torch holds; our estimate. Where more than this lies unused when memory runs out, it lies in pieces: whole
segments that nobody uses were given back before the error (c10/cuda/CUDACachingAllocator.cpp)."""


@dataclass(frozen=True)
class Usage:
    """What torch's allocator holds on a GPU: for tensors, and in all."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmented(self) -> bool:
        """Asked when memory ran out: whether it is there, but in pieces."""
        return self.reserved_bytes - self.allocated_bytes > FRAGMENTED_SHARE * self.reserved_bytes

    def __str__(self) -> str:
        return f"{self.allocated_bytes / GIB:.2f} GiB in tensors, {self.reserved_bytes / GIB:.2f} GiB held"


def usage(device: torch.device) -> Usage | None:
    """What is taken of a device now; None for the CPU, whose memory torch does not keep."""
    if device.type != "cuda":
        return None
    return Usage(int(torch.cuda.memory_allocated(device)), int(torch.cuda.memory_reserved(device)))


def empty_pools() -> None:
    """Give memory that torch keeps for later back to the device; pieces become whole again where nothing lies between.

    To be called between phases, whose tensors are of different sizes.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def device_budget(device: torch.device) -> int:
    """Bytes that tensors may take on a GPU, as torch and the system see it now.

    The two totals of a ROCm APU may differ (carve-out or GTT), and what is said to be free may be more than there is:
    so the smaller total, and on Linux no more than what an APU can take from the system.
    """
    properties = torch.cuda.get_device_properties(device)
    limits = [int(properties.total_memory), torch.cuda.mem_get_info(device)[1]]
    if sys.platform == "linux" and getattr(properties, "is_integrated", False):
        memory = psutil.virtual_memory()
        limits.append(max(0, memory.available - host_reserve(memory.total)))
    return min(limits)


def limit(device: torch.device, limit_bytes: int | None) -> int | None:
    """Let torch's allocator raise ``torch.OutOfMemoryError`` where this process would hold more than ``limit_bytes``.

    Returns:
        The limit in bytes; None where there is none: on the CPU, none asked for, or not below what torch counts as the
        whole (a share of less than the limit must never be set: an APU may report only its carve-out).
    """
    if device.type != "cuda" or limit_bytes is None:
        return None
    if release(torch.__version__) >= FRACTION_OF_PROPERTIES_FROM:
        whole = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        whole = torch.cuda.mem_get_info(device)[1]
    if limit_bytes >= whole:
        return None
    number = torch.cuda.current_device() if device.index is None else device.index  # it takes no plain "cuda"
    torch.cuda.set_per_process_memory_fraction(limit_bytes / whole, number)
    return limit_bytes


@contextmanager
def afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Do something on a device at the end of a ``with`` block, however it ends.

    Where the block failed, that error is the one to be told: with the GPU lost, whatever is asked of it fails too.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        with suppress(*((RuntimeError,) if failed else ())):
            act()
