"""The memory that a GPU's work may take, computed from facts, with its parts. Standard library only.

An APU has no dedicated memory. The BIOS carves out part of main memory, and more can be mapped (Linux: GTT, Windows:
shared memory). The GPU's share is lost to all other programs.

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
"""Main memory left to the system: the smaller of the two (unsloth's worker.py, Strix Halo)."""
DISPLAY_SHARE, DISPLAY_MIN_BYTES, DISPLAY_MAX_BYTES = 0.05, GIB // 2, GIB
"""The desktop's part of a GPU's own memory where nothing measures it: an estimate."""
HEADLESS_BYTES = 256 * MIB
"""A card of which less is in use than this shows no desktop."""
PAGE_BYTES = 4096
OF_CARD, HELD, LIBRARIES, KEPT_FREE = "memory of the card", "held by other programs", "for libraries", "kept free"
DESKTOP = "kept for the desktop"


@dataclass(frozen=True)
class Reserves:
    """Memory of an AMD card that tensors must not use, in MiB (``rules/memory_rules.toml``).

    Attributes:
        libraries_mib: used by libraries outside of torch's allocator during a run.
        kept_free_mib: kept free on Linux, because a card that is nearly full faults.
        headless_mib: the same for a card without a desktop: other programs' use does not change there.
    """

    libraries_mib: int
    kept_free_mib: int
    headless_mib: int
    source: str
    reviewed: str


@dataclass(frozen=True)
class BudgetItem:
    """One amount of the budget; negative if it is subtracted."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryBudget:
    """The memory for tensors, as far as it is known before a run.

    Attributes:
        total_bytes: bytes for tensors on the GPU now.
        capped: the allocator is limited to it.
        limit_bytes: the same, ignoring other programs' current memory, which a run reads itself.
        kept_free_bytes, library_bytes: parts of a card, as subtracted.
    """

    total_bytes: int
    why: str
    parts: tuple[BudgetItem, ...]
    capped: bool = True
    limit_bytes: int = 0
    kept_free_bytes: int = 0
    library_bytes: int = 0


def parts_text(parts: tuple[BudgetItem, ...]) -> str:
    """The parts as text: "24.0 GiB memory of the card, 1.4 GiB held by other programs, 1.2 GiB for libraries"."""
    return ", ".join(f"{size_text(abs(part.num_bytes))} {part.name}" for part in parts)


def desktop_bytes(pool_bytes: int) -> int:
    """Assumed memory of a desktop on a GPU with dedicated memory, if nothing measures it."""
    return min(max(int(pool_bytes * DISPLAY_SHARE), DISPLAY_MIN_BYTES), DISPLAY_MAX_BYTES)


def host_reserve(memory_bytes: int) -> int:
    """Main memory that an APU leaves to the system, in bytes."""
    return min(int(memory_bytes * HOST_RESERVE_SHARE), HOST_RESERVE_BYTES)


def budget(facts: HostFacts, gpu: Gpu, reserves: Reserves) -> MemoryBudget | None:
    """The budget of a GPU of this machine; None if its memory could not be read."""
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
    """The budget of an AMD card with dedicated memory.

    Args:
        card: its memory.
        others: measured (``HELD``) or assumed memory of other programs, negative.
        reserves: the rest that is subtracted.
        is_linux: a card that is nearly full faults there; Windows moves memory away instead, also below WSL.
        shows: it shows a desktop.
    """
    kept = (reserves.kept_free_mib if shows else reserves.headless_mib) * MIB if is_linux else 0
    libraries = reserves.libraries_mib * MIB
    parts = (card, others, BudgetItem(LIBRARIES, -libraries), BudgetItem(KEPT_FREE, -kept))
    total = max(0, sum(part.num_bytes for part in parts))
    limit = max(0, card.num_bytes - libraries - kept) if others.name == HELD else total
    why = "the card's own memory, less what other programs and libraries need"
    return MemoryBudget(total, why, tuple(p for p in parts if p.num_bytes), True, limit, kept, libraries)


def _shows_desktop(facts: HostFacts, gpu: Gpu) -> bool:
    """Whether the GPU may show the desktop: assumed, unless it has no outputs or another GPU is there for it.

    A card also counts as showing one if other programs use more than a little of its memory. Windows takes part of
    every GPU's memory, and silently moves data that does not fit into main memory.
    """
    arch = arch_of(gpu.gfx)
    if arch is not None and arch.is_cdna:  # no display outputs
        return False
    if (gpu.vram_used_bytes or 0) > HEADLESS_BYTES or facts.system == "windows" or facts.is_wsl:
        return True
    return not any(other.integrated for other in facts.gpus)


def _windows_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """Dedicated memory. If more can be shared: both, less the system's reserve."""
    if gpu.vram_bytes is None or facts.memory_bytes is None:
        return None
    dedicated = BudgetItem("dedicated memory", gpu.vram_bytes)
    shared = facts.memory_bytes // 2
    if gpu.vram_bytes >= shared:
        why = "dedicated memory, less what the desktop needs; more would be spilled, and slow"
        return _less_display(why, gpu.vram_bytes, (dedicated,))
    free = _free_for_gpu(facts)
    parts = (dedicated, BudgetItem("main memory that can be shared", shared), *free)
    total = gpu.vram_bytes + min([shared, *_sum_if_any(free)])
    return MemoryBudget(total, "dedicated and shared memory, less what the system keeps", parts, limit_bytes=total)


def _linux_apu(facts: HostFacts, gpu: Gpu) -> MemoryBudget | None:
    """The larger of the two pools. Mapped memory is taken from main memory; the carve-out is not part of it."""
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
        return _less_display("the BIOS's carve-out, less what the desktop needs", carved, parts)
    free = _free_for_gpu(facts)
    total = max(0, min([mapped, *_sum_if_any(free)]))
    why = "main memory that can be mapped, less what the system keeps"
    return MemoryBudget(total, why, (*parts, *free), limit_bytes=total)


def _free_for_gpu(facts: HostFacts) -> tuple[BudgetItem, ...]:
    """Free main memory and the system's reserve; empty if they could not be read."""
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
