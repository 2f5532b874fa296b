"""A card that is not here: torch's answers about it, HIP's answers, and the driver's counters in a simulated sysfs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_rocm.device import device_memory
from lora_rocm.hardware.memory_budget import GIB, MIB
from lora_rocm.hardware.settings import Settings
from tests.hardware.simulated_sysfs import SimulatedCard

GPU = torch.device("cuda", 0)
LIBRARIES, KEPT_FREE = 1229 * MIB, 512 * MIB
TOTAL = 24 * GIB
SETTINGS = Settings(
    memory_limit_bytes=TOTAL - LIBRARIES - KEPT_FREE, kept_free_bytes=KEPT_FREE, library_bytes=LIBRARIES
)
"""The plan's results for such a card."""


@dataclass
class FakeCard:
    """24 GiB. ``others``: of the desktop and of games, which HIP does not count. Sizes in bytes."""

    devices: Path
    others: int = 0
    tensors: int = 0
    reserved: int = 0
    libraries: int = 0
    integrated: bool = False
    has_counters: bool = True
    fractions: list[float] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCard:
        properties = SimpleNamespace(
            total_memory=TOTAL, is_integrated=int(self.integrated), pci_domain_id=0, pci_bus_id=3, pci_device_id=0
        )
        monkeypatch.setattr(device_memory, "DEVICES", self.devices)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (TOTAL - self.own, TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.tensors)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, number: self.fractions.append(share)
        )
        self.sync()
        return self

    @property
    def own(self) -> int:
        return self.reserved + self.libraries

    def sync(self) -> FakeCard:
        """Bring the driver's counters up to date."""
        if self.has_counters:
            SimulatedCard(self.devices, total=TOTAL, used=self.own + self.others)
        return self

    def changed(self, **values: int) -> FakeCard:
        for name, value in values.items():
            setattr(self, name, value)
        return self.sync()

    @property
    def limit(self) -> int:
        """The last limit set for the allocator, in bytes."""
        return round(self.fractions[-1] * TOTAL)
