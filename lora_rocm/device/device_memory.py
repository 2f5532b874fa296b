"""What is free on the device: the one place that asks HIP or CUDA for it.

HIP's answer alone leads into a full card (``hardware.card_memory``). Where the driver has counters of the card, the
smaller of the two counts. NVIDIA's answer, and HIP's below WSL, are right, and no counters are found there. On Windows
HIP's answer is too high; counters of that system have the same place here as those of Linux, as a ``CardMemory``.
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
        total_bytes: as the runtime counts it.
        free_bytes: for further allocations, whoever holds the rest.
        computing_bytes: what the runtime counts as held: by this process and other computing ones.
        is_integrated: the GPU has no memory of its own.
        is_counted: the driver's counters were read.
    """

    total_bytes: int
    free_bytes: int
    computing_bytes: int
    is_integrated: bool
    is_counted: bool


def read_memory(device: torch.device) -> DeviceMemory:
    """Read what a GPU's memory holds now. It costs a call of the driver and two small files, and waits for nothing."""
    free, total = map(int, torch.cuda.mem_get_info(device))
    properties = torch.cuda.get_device_properties(device)
    integrated = bool(getattr(properties, "is_integrated", False))
    card = read_card_memory(address_of(properties), DEVICES)
    runtime = Pool(total, total - free)
    if card is None and torch.version.hip is not None and sys.platform == "win32" and not integrated:
        # HIP's free memory is too high there (librocdxg#57), and nothing else says what others hold
        runtime = Pool(total, total - free + desktop_bytes(total))
    main_memory = psutil.virtual_memory().available if integrated and sys.platform == "linux" else None
    usable = free_for_tensors(runtime, card, integrated=integrated, main_memory_free_bytes=main_memory)
    return DeviceMemory(total, usable, max(0, total - free), integrated, card is not None)


def card_bytes(device: torch.device) -> int | None:
    """The size of a card's memory by the driver's counter; None if it has none, or none of its own."""
    properties = torch.cuda.get_device_properties(device)
    card = read_card_memory(address_of(properties), DEVICES)
    return None if card is None or getattr(properties, "is_integrated", False) else card.vram.total_bytes


def free_bytes(device: torch.device) -> int:
    """What is free on a GPU now."""
    return read_memory(device).free_bytes


def total_bytes(device: torch.device) -> int:
    """The smaller of the two totals of a GPU. Those of a ROCm APU may differ: its carve-out, or what it may map."""
    return min(int(torch.cuda.get_device_properties(device).total_memory), int(torch.cuda.mem_get_info(device)[1]))
