"""The memory that a GPU's work may take, computed from facts, with its parts. Standard library only.

An APU has no memory of its own. The BIOS carves out part of main memory, more of it can be mapped (Linux: GTT, Windows:
shared memory), and the GPU's share is lost to all other programs.

Sources: TheRock docs/faq.md (torch uses GTT if it is larger than the carve-out); unsloth#7960, unsloth#8482 (free
memory is reported too high); microsoft.com, WDDM video memory: half of main memory can be shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import Gpu, HostFacts

GIB = 2**30
HOST_RESERVE_SHARE, HOST_RESERVE_BYTES = 0.2, 16 * GIB
"""Main memory left to the system: the smaller of the two (unsloth's worker.py, Strix Halo)."""
DISPLAY_SHARE, DISPLAY_MIN_BYTES, DISPLAY_MAX_BYTES = 0.05, GIB // 2, GIB
"""The desktop's part of a GPU's own memory: an estimate, not measured."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Part:
    """One amount of the budget; negative if it is subtracted."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryBudget:
    """``total_bytes``: the limit for tensors on the GPU. ``capped``: it is less than the driver would allocate."""

    total_bytes: int
    why: str
    parts: tuple[Part, ...]
    capped: bool = True


def host_reserve(memory_bytes: int) -> int:
    """Main memory that an APU leaves to the system, in bytes."""
    return min(int(memory_bytes * HOST_RESERVE_SHARE), HOST_RESERVE_BYTES)


def budget(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """The budget of a GPU of this machine; None if its memory could not be read."""
    if not gpu.integrated:
        return _discrete(facts, gpu)
    if facts.system == "windows":
        return _windows_apu(facts, gpu)
    return _linux_apu(facts, gpu) if facts.system == "linux" and gpu.vendor == "amd" else None


def _discrete(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    if gpu.vram_bytes is None:
        return None
    vram = Part("memory of the card", gpu.vram_bytes)
    if not _shows_desktop(facts, gpu):
        return MemoryBudget(gpu.vram_bytes, "the card's own memory", (vram,), capped=False)
    return _less_display("the card's own memory, less what the desktop needs", gpu.vram_bytes, (vram,))


def _shows_desktop(facts: HostFacts, gpu: Gpu) -> bool:
    """Whether the GPU may show the desktop. It is assumed to, unless it cannot or another GPU is there for it.

    Windows takes part of every GPU's memory, and silently moves what does not fit into main memory.
    """
    arch = arch_of(gpu.gfx)
    if arch is not None and arch.is_cdna:  # no display outputs
        return False
    return gpu.vendor == "amd" and (
        facts.system == "windows" or facts.is_wsl or not any(other.integrated for other in facts.gpus)
    )


def _windows_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """Dedicated memory. If more can be shared: both, less the system's reserve."""
    if gpu.vram_bytes is None or facts.memory_bytes is None:
        return None
    dedicated = Part("dedicated memory", gpu.vram_bytes)
    shared = facts.memory_bytes // 2
    if gpu.vram_bytes >= shared:
        why = "dedicated memory, less what the desktop needs; more would be spilled, and slow"
        return _less_display(why, gpu.vram_bytes, (dedicated,))
    free = _free_for_gpu(facts)
    parts = (dedicated, Part("main memory that can be shared", shared), *free)
    total = gpu.vram_bytes + min([shared, *_sum_if_any(free)])
    return MemoryBudget(total, "dedicated and shared memory, less what the system keeps", parts)


def _linux_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """The larger of the two pools. Mapped memory is taken from main memory; the carve-out is not part of it."""
    carved, mapped = gpu.vram_bytes or 0, gpu.gtt_bytes or 0
    pages = facts.linux.ttm_pages_limit if facts.linux is not None else None
    limits = (Part("limit of the kernel (ttm)", pages * PAGE_BYTES),) if pages else ()
    mapped = min([mapped, *(part.num_bytes for part in limits)])
    if max(carved, mapped) <= 0:
        return None
    parts = (Part("carved out by the BIOS", carved), Part("can be mapped (GTT)", gpu.gtt_bytes or 0), *limits)
    if carved >= mapped:
        return _less_display("the BIOS's carve-out, less what the desktop needs", carved, parts)
    free = _free_for_gpu(facts)
    total = max(0, min([mapped, *_sum_if_any(free)]))
    return MemoryBudget(total, "main memory that can be mapped, less what the system keeps", (*parts, *free))


def _free_for_gpu(facts: HostFacts) -> tuple[Part, ...]:
    """Free main memory and the system's reserve; empty if they could not be read."""
    if facts.memory_bytes is None or facts.memory_available_bytes is None:
        return ()
    return (
        Part("main memory that is free", facts.memory_available_bytes),
        Part("kept for the system", -host_reserve(facts.memory_bytes)),
    )


def _sum_if_any(parts: tuple[Part, ...]) -> list[int]:
    return [max(0, sum(part.num_bytes for part in parts))] if parts else []


def _less_display(why: str, pool_bytes: int, parts: tuple[Part, ...]) -> MemoryBudget:
    reserve = min(max(int(pool_bytes * DISPLAY_SHARE), DISPLAY_MIN_BYTES), DISPLAY_MAX_BYTES)
    return MemoryBudget(max(0, pool_bytes - reserve), why, (*parts, Part("kept for the desktop", -reserve)))
