"""Memory of a card that all programs together use, from the driver's counters. Standard library only.

The free memory that HIP reports is not enough: on Linux it ignores the memory of the desktop and of games (ROCm#6389,
rocm-systems#7993), and on Windows it is too high (librocdxg#57). Under WSL HIP's value is correct, and the driver has
no counters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
MAX_BYTES = 2**63
SAME_POOL = 0.9
"""Two reported sizes of an integrated GPU's memory count as the same pool if their ratio is at least this."""


@dataclass(frozen=True)
class Pool:
    """One kind of memory: its size, and the bytes in use by all programs together."""

    total_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.total_bytes - self.used_bytes)


@dataclass(frozen=True)
class CardMemory:
    """The memory counters of one card.

    Attributes:
        vram: dedicated memory of the card, or the carve-out of an integrated GPU.
        gtt: main memory that the GPU may map, or None if the system does not report it.
    """

    vram: Pool
    gtt: Pool | None = None

    def for_tensors(self, integrated: bool) -> Pool:
        """Return the pool that torch's tensors use: the card's own memory, or the larger pool of an integrated GPU."""
        if not integrated or self.gtt is None:
            return self.vram
        return max(self.vram, self.gtt, key=lambda pool: pool.total_bytes)


def read_card_memory(pci_address: str | None, devices: Path = PCI_DEVICES) -> CardMemory | None:
    """Return the memory counters of the card at a PCI address, read from Linux' sysfs; None if they are unknown.

    They are unknown if the driver has none (only amdgpu has) or they cannot be read. The counters of a sleeping card
    are not read, because reading may wake it.

    Args:
        pci_address: the card's address as sysfs writes it ("0000:03:00.0").
        devices: folder of the PCI devices. Tests pass a simulated one.
    """
    if pci_address is None or PCI_ADDRESS.fullmatch(pci_address) is None:
        return None
    folder = devices / pci_address.lower()
    if _text(folder / "power" / "runtime_status") == "suspended":
        return None
    vram = _pool(folder, "vram")
    return None if vram is None else CardMemory(vram, _pool(folder, "gtt"))


def free_for_tensors(
    runtime: Pool, card: CardMemory | None, *, integrated: bool, main_memory_free_bytes: int | None
) -> int:
    """Return the free bytes of a GPU: the smallest of the values from runtime, driver and system.

    Args:
        runtime: memory as HIP or CUDA reports it. It is ignored if it covers only the small carve-out of an integrated
            GPU, and the driver reports a larger pool.
        card: the driver's counters, or None if unknown.
        integrated: whether the GPU has no dedicated memory.
        main_memory_free_bytes: main memory that an integrated GPU may take at most, or None if unknown.
    """
    pool = card.for_tensors(integrated) if card is not None else None
    found = [pool.free_bytes] if pool is not None else []
    if pool is None or not integrated or runtime.total_bytes >= SAME_POOL * pool.total_bytes:
        found.append(runtime.free_bytes)
    takes_main_memory = integrated and (card is None or pool is not card.vram)
    if takes_main_memory and main_memory_free_bytes is not None:
        found.append(main_memory_free_bytes)
    return max(0, min(found))


def _pool(folder: Path, name: str) -> Pool | None:
    total, used = (_number(folder / f"mem_info_{name}_{which}") for which in ("total", "used"))
    return None if not total or used is None else Pool(total, used)


def _number(file: Path) -> int | None:
    text = _text(file)
    number = int(text) if re.fullmatch(r"[0-9]{1,19}", text) else MAX_BYTES
    return number if number < MAX_BYTES else None


def _text(file: Path) -> str:
    """The stripped text of a small file; empty if it cannot be read."""
    try:
        with file.open("rb") as opened:
            return opened.read(64).decode("ascii", "replace").strip()
    except OSError:
        return ""
