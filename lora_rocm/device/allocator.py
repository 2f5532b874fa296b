"""The allocator of the device: its budget, its limit, and its usage."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from lora_rocm.device.device_memory import read_memory, total_bytes
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.memory_budget import GIB, desktop_bytes, host_reserve
from lora_rocm.hardware.settings import Settings
from lora_rocm.planning.step_plan import CONTEXT_BYTES

ASK_EVERY_S = 5.0
"""Least time between two readings of the driver's counters."""

FRAGMENTED_SHARE = 0.2
"""Estimated share of the memory held by torch. If more is unused when memory runs out, the pool is fragmented: whole
unused segments were returned before the error (c10/cuda/CUDACachingAllocator.cpp).
"""
PIECE_BYTES = 512
"""Allocators round sizes up to a multiple of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
OWN_SEGMENT_BYTES, SEGMENT_STEP_BYTES, REST_BYTES = 10 * 2**20, 2 * 2**20, 2**20
"""A tensor of at least the first size gets its own segment, a multiple of the second size. A remainder up to the third
is not used for other tensors (same file: kMinLargeAlloc, kRoundLarge, kSmallSize).
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
    """The current usage of a device; None for the CPU, because torch does not pool its memory."""
    if device.type != "cuda":
        return None
    return Usage(int(torch.cuda.memory_allocated(device)), int(torch.cuda.memory_reserved(device)))


def taken_bytes(num_bytes: int) -> int:
    """Bytes that an allocator counts for a tensor allocated in empty memory."""
    if num_bytes < OWN_SEGMENT_BYTES:
        return num_bytes
    segment_bytes = -(-num_bytes // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
    return segment_bytes if segment_bytes - num_bytes <= REST_BYTES else num_bytes


def empty_pools() -> None:
    """Return torch's unused memory to the device, which also joins free neighbouring pieces, and its pinned memory.

    Call it between phases, because their tensors differ in size.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        # torch 2.11 has the first name alone, later versions both
        release_pinned = getattr(torch._C, "_host_emptyCache", None) or torch.accelerator.empty_host_cache
        release_pinned()


def device_budget(device: torch.device) -> int:
    """Bytes that tensors may take on a GPU without a planned limit, from the current reports of torch and the system.

    For an APU on Linux it is at most what it can take from the system.
    """
    limits = [total_bytes(device)]
    if sys.platform == "linux" and getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        memory = psutil.virtual_memory()
        limits.append(max(0, memory.available - host_reserve(memory.total)))
    return min(limits)


def limit_now(device: torch.device, settings: Settings) -> int | None:
    """The limit for torch's allocator, from the plan and from other programs' current GPU memory; None: no limit.

    Tensors may use torch's memory and all free memory, except for the part that stays free and the part that libraries
    will still take. The sum does not depend on how much memory torch has.
    """
    planned = settings.memory_limit_bytes
    if device.type != "cuda" or planned is None:
        return None
    memory, held = read_memory(device), int(torch.cuda.memory_reserved(device))
    if memory.is_integrated and not memory.is_counted:
        return planned  # free shared memory is unknown; HIP may mean the carve-out alone
    outside_torch = max(0, memory.computing_bytes - held)
    to_come = max(0, settings.library_bytes - outside_torch)
    needs_counters = settings.kept_free_bytes > 0  # a card on Linux; HIP does not see all memory in use
    unseen = desktop_bytes(memory.total_bytes) if needs_counters and not memory.is_counted else 0
    return max(0, min(planned, held + memory.free_bytes - unseen - settings.kept_free_bytes - to_come))


def room_bytes(device: torch.device, settings: Settings, *, steady: bool = False) -> int:
    """Bytes that a GPU has for tensors: the current limit, otherwise its memory without the libraries' share.

    ``steady``: the same at each start of a run, as long as other programs take no more than a desktop usually does.
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
        The limit in bytes. None if there is none: on the CPU, if none was requested, or if it is not below the total
            that torch counts (never set a fraction below the limit: an APU may report only its carve-out).
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
    """Keeps the allocator's limit in step with what other programs hold: they may take more while a run trains.

    Memory that they take shrinks the limit before the card is full; then torch raises an error that the run recovers
    from. No computed value depends on it.
    """

    def __init__(
        self, device: torch.device, settings: Settings, notify: Callable[[str], None] = lambda text: None
    ) -> None:
        self._device, self._settings, self._say = device, settings, notify
        self._asked_at = float("-inf")
        self._told = False

    def renew(self) -> int | None:
        """Set the limit from the memory that is free now. Call it between steps and before large allocations.

        Returns None if there is no limit.
        """
        self._asked_at = time.monotonic()
        now = limit_now(self._device, self._settings)
        if now is None:
            return None
        seen = usage(self._device)
        if seen is not None and now < seen.allocated_bytes and not self._told:
            self._told = True
            self._say(
                f"Other programs take GPU memory: {size_text(now)} are left for this run, which uses "
                f"{size_text(seen.allocated_bytes)}. If it needs more, it continues with smaller parts of a batch."
            )
        limit(self._device, now)
        return now

    def renew_if_due(self) -> None:
        """As ``renew``, at most every few seconds."""
        if time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self.renew()


NO_LIMIT = LimitFollower(torch.device("cpu"), Settings())
"""For a device without a memory limit to follow."""


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
