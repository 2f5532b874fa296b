"""Budget of GPU memory for a run, and the items that it is calculated from. Standard library only.

An APU has no dedicated memory. The BIOS carves out part of main memory, and the GPU can map more (on Linux as GTT, on
Windows as shared memory). Other programs cannot use the GPU's share.

Sources: TheRock docs/faq.md (torch uses GTT if it is larger than the carve-out); unsloth#7960, unsloth#8482 (free
memory is reported too high); microsoft.com, WDDM video memory: half of main memory can be shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import Gpu, HostFacts

GIB, MIB = 2**30, 2**20
HOST_RESERVE_SHARE, HOST_RESERVE_BYTES = 0.2, 16 * GIB
"""Main memory left to the system on an APU: the smaller of this share and this size.

Source: unsloth's worker.py (Strix Halo).
"""
DISPLAY_SHARE, DISPLAY_MIN_BYTES, DISPLAY_MAX_BYTES = 0.05, GIB // 2, GIB
"""Estimated memory of the desktop on a GPU with dedicated memory, used where it cannot be measured."""
HEADLESS_BYTES = 256 * MIB
"""A GPU counts as one without a desktop if less memory than this is in use."""
PAGE_BYTES = 4096
OF_CARD, HELD, LIBRARIES, KEPT_FREE = "memory of the card", "held by other programs", "for libraries", "kept free"
DESKTOP = "kept for the desktop"


@dataclass(frozen=True)
class Reserves:
    """Memory of an AMD card that tensors must not use, in MiB (``rules/memory_rules.toml``).

    Attributes:
        libraries_mib: memory that libraries use outside of torch's allocator during a run.
        kept_free_mib: memory kept free on Linux, because a nearly full card faults.
        headless_mib: memory kept free on a card without a desktop. A smaller reserve is enough, because the memory use
            of other programs does not change.
    """

    libraries_mib: int
    kept_free_mib: int
    headless_mib: int
    source: str
    reviewed: str


@dataclass(frozen=True)
class BudgetItem:
    """One item in the calculation of the budget. Bytes that are subtracted are negative."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryBudget:
    """The memory for tensors, as far as it is known before a run.

    Attributes:
        total_bytes: bytes that tensors on the GPU can use now.
        capped: whether torch's allocator is limited to the budget.
        limit_bytes: budget before other programs' measured memory is subtracted. The run itself subtracts that.
        kept_free_bytes: memory of the card that is kept free. It is already subtracted.
        library_bytes: memory of the card for libraries. It is already subtracted.
    """

    total_bytes: int
    why: str
    parts: tuple[BudgetItem, ...]
    capped: bool = True
    limit_bytes: int = 0
    kept_free_bytes: int = 0
    library_bytes: int = 0


def parts_text(parts: tuple[BudgetItem, ...]) -> str:
    """Return the items as text.

    Example: "24.0 GiB memory of the card, 1.4 GiB held by other programs, 1.2 GiB for libraries".
    """
    return ", ".join(f"{size_text(abs(part.num_bytes))} {part.name}" for part in parts)


def desktop_bytes(pool_bytes: int) -> int:
    """Return the estimated memory of the desktop on a GPU with dedicated memory, in bytes."""
    return min(max(int(pool_bytes * DISPLAY_SHARE), DISPLAY_MIN_BYTES), DISPLAY_MAX_BYTES)


def host_reserve(memory_bytes: int) -> int:
    """Main memory that an APU leaves to the system, in bytes."""
    return min(int(memory_bytes * HOST_RESERVE_SHARE), HOST_RESERVE_BYTES)


def budget(facts: HostFacts, gpu: Gpu, reserves: Reserves) -> MemoryBudget | None:
    """Return the budget of a GPU of this machine, or None if its memory could not be read."""
    if not gpu.integrated:
        return _discrete(facts, gpu, reserves)
    if facts.system == "windows":
        return _windows_apu(facts, gpu)
    return _linux_apu(facts, gpu) if facts.system == "linux" and gpu.vendor == "amd" else None


def _discrete(facts: HostFacts, gpu: Gpu, reserves: Reserves) -> MemoryBudget | None:
    if gpu.vram_bytes is None:
        return None
    card = BudgetItem(OF_CARD, gpu.vram_bytes)
    if gpu.vendor != "amd":
        return MemoryBudget(gpu.vram_bytes, "the card's own memory", (card,), False, gpu.vram_bytes)
    shows, held = _shows_desktop(facts, gpu), gpu.vram_used_bytes
    if held is not None:
        others = BudgetItem(HELD, -held)
    else:
        others = BudgetItem(DESKTOP, -desktop_bytes(gpu.vram_bytes) if shows else 0)
    return card_budget(card, others, reserves, is_linux=facts.system == "linux" and not facts.is_wsl, shows=shows)


def card_budget(
    card: BudgetItem, others: BudgetItem, reserves: Reserves, *, is_linux: bool, shows: bool
) -> MemoryBudget:
    """Return the budget of an AMD card with dedicated memory.

    Args:
        card: memory of the card.
        others: memory of other programs as a negative number: measured if its name is ``HELD``, else estimated.
        reserves: further amounts to subtract.
        is_linux: whether a nearly full card faults. On Windows and WSL it does not, because Windows moves memory away.
        shows: whether the card shows a desktop.
    """
    kept = (reserves.kept_free_mib if shows else reserves.headless_mib) * MIB if is_linux else 0
    libraries = reserves.libraries_mib * MIB
    parts = (card, others, BudgetItem(LIBRARIES, -libraries), BudgetItem(KEPT_FREE, -kept))
    total = max(0, sum(part.num_bytes for part in parts))
    limit = max(0, card.num_bytes - libraries - kept) if others.name == HELD else total
    why = "the card's own memory, minus the memory of other programs and libraries"
    return MemoryBudget(total, why, tuple(p for p in parts if p.num_bytes), True, limit, kept, libraries)


def _shows_desktop(facts: HostFacts, gpu: Gpu) -> bool:
    """Whether the GPU may show the desktop; True if unknown.

    The result is False for a GPU without display outputs, or if an integrated GPU can show the desktop. It is True if
    more than a little of the GPU's memory is in use. It is also True on Windows, which takes part of every GPU's memory
    and silently moves excess data into main memory.
    """
    arch = arch_of(gpu.gfx)
    if arch is not None and arch.is_cdna:  # no display outputs
        return False
    if (gpu.vram_used_bytes or 0) > HEADLESS_BYTES or facts.system == "windows" or facts.is_wsl:
        return True
    return not any(other.integrated for other in facts.gpus)


def _windows_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """Return the budget of an APU on Windows: its dedicated memory, plus shared memory if that is larger.

    If shared memory is included, the system's reserve is subtracted.
    """
    if gpu.vram_bytes is None or facts.memory_bytes is None:
        return None
    dedicated = BudgetItem("dedicated memory", gpu.vram_bytes)
    shared = facts.memory_bytes // 2
    if gpu.vram_bytes >= shared:
        why = "dedicated memory, minus the desktop's share; a larger run would spill and be slow"
        return _less_display(why, gpu.vram_bytes, (dedicated,))
    free = _free_for_gpu(facts)
    parts = (dedicated, BudgetItem("main memory that can be shared", shared), *free)
    total = gpu.vram_bytes + min([shared, *_sum_if_any(free)])
    return MemoryBudget(total, "dedicated and shared memory, minus the system's reserve", parts, limit_bytes=total)


def _linux_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """Return the budget of an APU on Linux: the larger of carve-out and mapped memory.

    Mapped memory is limited by free main memory; the carve-out is not part of main memory.
    """
    carved, mapped = gpu.vram_bytes or 0, gpu.gtt_bytes or 0
    pages = facts.linux.ttm_pages_limit if facts.linux is not None else None
    limits = (BudgetItem("limit of the kernel (pages_limit)", pages * PAGE_BYTES),) if pages else ()
    mapped = min([mapped, *(part.num_bytes for part in limits)])
    if max(carved, mapped) <= 0:
        return None
    parts = (
        BudgetItem("carved out by the BIOS", carved),
        BudgetItem("can be mapped (GTT)", gpu.gtt_bytes or 0),
        *limits,
    )
    if carved >= mapped:
        return _less_display("the BIOS's carve-out, minus the desktop's share", carved, parts)
    free = _free_for_gpu(facts)
    total = max(0, min([mapped, *_sum_if_any(free)]))
    why = "main memory that can be mapped, minus the system's reserve"
    return MemoryBudget(total, why, (*parts, *free), limit_bytes=total)


def _free_for_gpu(facts: HostFacts) -> tuple[BudgetItem, ...]:
    """Return the items for free main memory and for the system's reserve; () if they could not be read."""
    if facts.memory_bytes is None or facts.memory_available_bytes is None:
        return ()
    return (
        BudgetItem("main memory that is free", facts.memory_available_bytes),
        BudgetItem("kept for the system", -host_reserve(facts.memory_bytes)),
    )


def _sum_if_any(parts: tuple[BudgetItem, ...]) -> list[int]:
    return [max(0, sum(part.num_bytes for part in parts))] if parts else []


def _less_display(why: str, pool_bytes: int, parts: tuple[BudgetItem, ...]) -> MemoryBudget:
    reserve = desktop_bytes(pool_bytes)
    total = max(0, pool_bytes - reserve)
    return MemoryBudget(total, why, (*parts, BudgetItem(DESKTOP, -reserve)), limit_bytes=total)
