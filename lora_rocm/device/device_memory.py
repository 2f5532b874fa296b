"""Reads the free memory of a GPU. No other module asks HIP or CUDA for it.

HIP's number alone would let the run overfill the card (``hardware.card_memory``). If the driver has memory counters for
the card, the smaller of the two values is used. NVIDIA's number and HIP's number inside WSL are correct; there are no
counters in these two cases. On Windows HIP's number is too high, so Windows' counters are used like the Linux ones, as
a ``CardMemory``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import psutil
import torch

from lora_rocm.hardware.card_memory import PCI_DEVICES, Pool, free_for_tensors, read_card_memory
from lora_rocm.hardware.memory_budget import desktop_bytes
from lora_rocm.hardware.pci import address_of

DEVICES = PCI_DEVICES


@dataclass(frozen=True)
class DeviceMemory:
    """A reading of a GPU's memory.

    Attributes:
        total_bytes: the total that HIP or CUDA reports.
        free_bytes: bytes that can still be allocated. Memory in use by other programs is already subtracted.
        computing_bytes: bytes in use by this and other computing processes, as HIP or CUDA reports them.
        is_counted: whether the driver's counters could be read.
    """

    total_bytes: int
    free_bytes: int
    computing_bytes: int
    is_counted: bool


def shares_main_memory(device: torch.device) -> bool:
    """Whether a device is a GPU that lacks dedicated memory (an APU). False for the CPU."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def read_memory(device: torch.device) -> DeviceMemory:
    """Read a GPU's current memory.

    This costs one driver call and two small file reads, and does not wait for the GPU.
    """
    free, total = map(int, torch.cuda.mem_get_info(device))
    properties = torch.cuda.get_device_properties(device)
    integrated = shares_main_memory(device)
    card = read_card_memory(address_of(properties), DEVICES)
    runtime = Pool(total, total - free)
    if card is None and torch.version.hip is not None and sys.platform == "win32" and not integrated:
        # HIP's free memory is too high there (librocdxg#57), and nothing else reports other programs' memory
        runtime = Pool(total, total - free + desktop_bytes(total))
    main_memory = psutil.virtual_memory().available if integrated and sys.platform == "linux" else None
    usable = free_for_tensors(runtime, card, integrated=integrated, main_memory_free_bytes=main_memory)
    return DeviceMemory(total, usable, max(0, total - free), card is not None)


def card_bytes(device: torch.device) -> int | None:
    """Return a card's memory size by the driver's counter, or None if it has no counter or no dedicated memory."""
    properties = torch.cuda.get_device_properties(device)
    card = read_card_memory(address_of(properties), DEVICES)
    return None if card is None or shares_main_memory(device) else card.vram.total_bytes


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a GPU now."""
    return read_memory(device).free_bytes


def total_bytes(device: torch.device) -> int:
    """Return the smaller of the two totals that torch reports for a GPU.

    On a ROCm APU they may differ: one may be the carve-out, the other all memory that the GPU may map.
    """
    return min(int(torch.cuda.get_device_properties(device).total_memory), int(torch.cuda.mem_get_info(device)[1]))
