"""torch's memory allocator on a GPU: the memory available to it, the limit that enforces this, and its usage."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from lora_rocm.device.device_memory import read_memory, shares_main_memory, total_bytes
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.memory_budget import GIB, desktop_bytes, host_reserve
from lora_rocm.hardware.settings import Settings
from lora_rocm.planning.step_plan import CONTEXT_BYTES

ASK_EVERY_S = 5.0
"""Minimum number of seconds between two readings of the driver's memory counters."""

FRAGMENTED_SHARE = 0.2
"""Estimated share of torch's reserved memory. If more than this is unused when memory runs out, the memory is
fragmented: torch returns whole unused segments before it raises the error (c10/cuda/CUDACachingAllocator.cpp).
"""
PIECE_BYTES = 512
"""torch's allocator rounds sizes up to a multiple of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
OWN_SEGMENT_BYTES, SEGMENT_STEP_BYTES, REST_BYTES = 10 * 2**20, 2 * 2**20, 2**20
"""A tensor of at least the first size gets its own segment. The segment's size is a multiple of the second size. An
unused remainder of at most the third size is not used for other tensors. (kMinLargeAlloc, kRoundLarge and kSmallSize in
c10/cuda/CUDACachingAllocator.cpp)
"""


@dataclass(frozen=True)
class Usage:
    """Memory of torch's allocator on a GPU: bytes in tensors, and bytes reserved in total."""

    allocated_bytes: int
    reserved_bytes: int

    @property
    def fragmented(self) -> bool:
        """Whether an out-of-memory error is due to fragmentation: much memory is unused, but in small pieces."""
        return self.reserved_bytes - self.allocated_bytes > FRAGMENTED_SHARE * self.reserved_bytes

    def __str__(self) -> str:
        return f"{self.allocated_bytes / GIB:.2f} GiB in tensors, {self.reserved_bytes / GIB:.2f} GiB reserved"


def usage(device: torch.device) -> Usage | None:
    """Return the current usage of a device, or None for the CPU, where torch does not pool memory."""
    if device.type != "cuda":
        return None
    return Usage(int(torch.cuda.memory_allocated(device)), int(torch.cuda.memory_reserved(device)))


def taken_bytes(num_bytes: int) -> int:
    """Bytes that torch's allocator counts for a tensor of ``num_bytes`` if no freed memory is reused."""
    if num_bytes < OWN_SEGMENT_BYTES:
        return num_bytes
    segment_bytes = -(-num_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
    return segment_bytes if segment_bytes - num_bytes <= REST_BYTES else num_bytes


def empty_pools() -> None:
    """Return torch's unused GPU memory to the device, and its unused pinned memory to the system.

    Call it between phases: their tensors differ in size, and large tensors do not fit into small free pieces.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        # torch 2.11 has the first name alone, later versions both
        release_pinned = getattr(torch._C, "_host_emptyCache", None) or torch.accelerator.empty_host_cache
        release_pinned()


def device_budget(device: torch.device) -> int:
    """Bytes of a GPU's memory that tensors may use if the plan sets no limit.

    On Linux, an APU gets at most the main memory that is available now, less the system's reserve.
    """
    limits = [total_bytes(device)]
    if sys.platform == "linux" and shares_main_memory(device):
        memory = psutil.virtual_memory()
        limits.append(max(0, memory.available - host_reserve(memory.total)))
    return min(limits)


def limit_now(device: torch.device, settings: Settings) -> int | None:
    """Return the current limit of torch's allocator in bytes, or None if there is no limit.

    It depends on the plan and on the GPU's free memory.

    Tensors may use the memory that torch has reserved and all free memory, except for two parts: the share that stays
    free, and the memory that libraries have yet to allocate. So the limit does not depend on how much torch has
    reserved.
    """
    planned = settings.memory_limit_bytes
    if device.type != "cuda" or planned is None:
        return None
    memory, held = read_memory(device), int(torch.cuda.memory_reserved(device))
    if shares_main_memory(device) and not memory.is_counted:
        return planned  # free shared memory is unknown; HIP may mean the carve-out alone
    outside_torch = max(0, memory.computing_bytes - held)
    to_come = max(0, settings.library_bytes - outside_torch)
    needs_counters = settings.kept_free_bytes > 0  # a card on Linux; HIP does not see all memory in use
    unseen = desktop_bytes(memory.total_bytes) if needs_counters and not memory.is_counted else 0
    return max(0, min(planned, held + memory.free_bytes - unseen - settings.kept_free_bytes - to_come))


def room_bytes(device: torch.device, settings: Settings, *, steady: bool = False) -> int:
    """Bytes that tensors may use on a GPU: the current limit or, without one, its memory less the libraries' share.

    ``steady``: return the same value at each start of a run, unless other programs use more than a desktop usually
    does.
    """
    limit = limit_now(device, settings)
    if limit is None or settings.memory_limit_bytes is None:
        return max(0, device_budget(device) - CONTEXT_BYTES)
    if steady and settings.kept_free_bytes:
        return min(limit, max(0, settings.memory_limit_bytes - desktop_bytes(settings.memory_limit_bytes)))
    return limit


def limit(device: torch.device, limit_bytes: int | None) -> int | None:
    """Make torch's allocator raise ``torch.OutOfMemoryError`` beyond ``limit_bytes`` in this process.

    Returns:
        The limit in bytes, or None if no limit was set: on the CPU, if ``limit_bytes`` is None, or if ``limit_bytes``
            is not below torch's total memory. (An APU may report only its carve-out as the total, so a larger limit is
            valid.)
    """
    if device.type != "cuda" or limit_bytes is None:
        return None
    whole = int(torch.cuda.get_device_properties(device).total_memory)
    if limit_bytes >= whole:
        return None
    number = torch.cuda.current_device() if device.index is None else device.index  # needs an explicit index
    torch.cuda.set_per_process_memory_fraction(limit_bytes / whole, number)
    return limit_bytes


class LimitFollower:
    """Adjusts the allocator's limit to the memory that other programs use, which may grow while a run trains.

    The limit shrinks before the card is full, so torch raises an error from which the run can recover. The limit
    affects no computed value.
    """

    def __init__(
        self, device: torch.device, settings: Settings, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        self._device, self._settings, self._say = device, settings, notify
        self._asked_at = float("-inf")
        self._told = False

    def renew(self) -> int | None:
        """Set the limit from the memory that is free now, and return it; None means no limit.

        Call it between steps and before large allocations.
        """
        self._asked_at = time.monotonic()
        now = limit_now(self._device, self._settings)
        if now is None:
            return None
        seen = usage(self._device)
        if seen is not None and now < seen.allocated_bytes and not self._told:
            self._told = True
            self._say(
                f"Other programs use more GPU memory now: {size_text(now)} are left for this run, which already uses "
                f"{size_text(seen.allocated_bytes)}. If the run needs more, it continues with smaller parts of a batch."
            )
        limit(self._device, now)
        return now

    def renew_if_due(self) -> None:
        """Call ``renew``, but at most once every ``ASK_EVERY_S`` seconds."""
        if time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self.renew()


NO_LIMIT = LimitFollower(torch.device("cpu"), Settings())
"""A ``LimitFollower`` that does nothing, for a device without a memory limit."""


@contextmanager
def afterwards(act: Callable[[], None]) -> Iterator[None]:
    """Run ``act`` at the end of a ``with`` block, even if the block raises an error.

    In that case RuntimeErrors of ``act`` are suppressed: on a lost GPU every call fails, and the first error is the
    useful one.
    """
    failed = True
    try:
        yield
        failed = False
    finally:
        with suppress(*((RuntimeError,) if failed else ())):
            act()
