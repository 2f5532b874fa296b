"""Free memory of the device: the only module that asks HIP or CUDA for it.

HIP's answer alone would fill the card too far (``hardware.card_memory``). If the driver has counters for the card, the
smaller value is used. NVIDIA's answer, and HIP's inside WSL, are correct, and there are no counters there. On Windows
HIP's answer is too high. Windows' counters are used here like the Linux ones, as a ``CardMemory``.
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
        total_bytes: the runtime's total.
        free_bytes: bytes for further allocations, whichever program uses the rest.
        computing_bytes: bytes in use by this process and other computing ones, according to the runtime.
        is_integrated: the GPU has no dedicated memory.
        is_counted: the driver's counters were read.
    """

    total_bytes: int
    free_bytes: int
    computing_bytes: int
    is_integrated: bool
    is_counted: bool


def read_memory(device: torch.device) -> DeviceMemory:
    """Read a GPU's current memory. It costs a driver call and two small files, and does not wait for the GPU."""
    free, total = map(int, torch.cuda.mem_get_info(device))
    properties = torch.cuda.get_device_properties(device)
    integrated = bool(getattr(properties, "is_integrated", False))
    card = read_card_memory(address_of(properties), DEVICES)
    runtime = Pool(total, total - free)
    if card is None and torch.version.hip is not None and sys.platform == "win32" and not integrated:
        # HIP's free memory is too high there (librocdxg#57), and nothing else reports other programs' memory
        runtime = Pool(total, total - free + desktop_bytes(total))
    main_memory = psutil.virtual_memory().available if integrated and sys.platform == "linux" else None
    usable = free_for_tensors(runtime, card, integrated=integrated, main_memory_free_bytes=main_memory)
    return DeviceMemory(total, usable, max(0, total - free), integrated, card is not None)


def card_bytes(device: torch.device) -> int | None:
    """The size of a card's memory by the driver's counter; None without a counter or without dedicated memory."""
    properties = torch.cuda.get_device_properties(device)
    card = read_card_memory(address_of(properties), DEVICES)
    return None if card is None or getattr(properties, "is_integrated", False) else card.vram.total_bytes


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on a GPU now."""
    return read_memory(device).free_bytes


def total_bytes(device: torch.device) -> int:
    """The smaller of a GPU's two totals. On a ROCm APU they may differ: its carve-out, or all memory it may map."""
    return min(int(torch.cuda.get_device_properties(device).total_memory), int(torch.cuda.mem_get_info(device)[1]))
