"""PCI ids, addresses, and adapter names of AMD GPUs with their architectures: ``pci.toml``. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lora_rocm.foundation.tables import read_table

AMD = "1002"


@dataclass(frozen=True)
class AdapterName:
    """A pattern of adapter names, and their architecture."""

    pattern: str
    gfx: str


@dataclass(frozen=True)
class PciTable:
    """The file. ``ids``: architecture -> device numbers in hexadecimal, with spaces between them."""

    names: tuple[AdapterName, ...]
    ids: Mapping[str, str]


@cache
def pci_table() -> PciTable:
    """The table. See ``read_table`` for errors."""
    return read_table(Path(__file__).with_name("pci.toml"), PciTable)


@cache
def by_id() -> Mapping[str, str]:
    """PCI id ("1002:744c") -> architecture."""
    return {f"{AMD}:{device}": gfx for gfx, devices in pci_table().ids.items() for device in devices.split()}


def gfx_of_id(pci_id: str | None) -> str | None:
    """The architecture of a PCI id ("1002:744c"); None if the table lacks it."""
    return by_id().get(pci_id.lower()) if pci_id else None


def gfx_of_name(name: str) -> str | None:
    """The architecture by an adapter's name ("AMD Radeon(TM) 8060S Graphics"); None if no pattern matches."""
    for row in pci_table().names:
        if re.search(rf"(?<![0-9A-Za-z])(?:RX ?|PRO ?)?W?(?:{row.pattern})(?![0-9])", name, re.IGNORECASE):
            return row.gfx
    return None


def product_name(ids_text: str, device: str, revision: str) -> str | None:
    """The product in the text of an ``amdgpu.ids`` file; ``device`` ("744c") and ``revision`` ("c8") have no 0x."""
    wanted = (device.lower(), revision.lower().zfill(2))
    for line in ids_text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and (parts[0].lower(), parts[1].lower()) == wanted:
            return parts[2]
    return None


def address_of(properties: Any) -> str | None:
    """Return a GPU's PCI address as sysfs writes it, from torch's properties; None if this torch lacks them."""
    parts: list[int | None] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == len(parts) else None
