"""PCI ids and adapter names of AMD GPUs with their architectures (``pci.toml``), and PCI addresses.

Standard library only.
"""

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
    """A regular expression for adapter names, and the architecture of these adapters."""

    pattern: str
    gfx: str


@dataclass(frozen=True)
class PciTable:
    """Contents of ``pci.toml``.

    ids: for each architecture, its PCI device numbers in hexadecimal, separated by spaces.
    """

    names: tuple[AdapterName, ...]
    ids: Mapping[str, str]


@cache
def pci_table() -> PciTable:
    """Return the contents of ``pci.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("pci.toml"), PciTable)


@cache
def by_id() -> Mapping[str, str]:
    """Return the architecture of each PCI id ("1002:744c")."""
    return {f"{AMD}:{device}": gfx for gfx, devices in pci_table().ids.items() for device in devices.split()}


def gfx_of_id(pci_id: str | None) -> str | None:
    """Return the architecture of a PCI id ("1002:744c"), or None if the table lacks it."""
    return by_id().get(pci_id.lower()) if pci_id else None


def gfx_of_name(name: str) -> str | None:
    """Return the architecture by adapter name ("AMD Radeon(TM) 8060S Graphics"), or None if no pattern matches."""
    for row in pci_table().names:
        if re.search(rf"(?<![0-9A-Za-z])(?:RX ?|PRO ?)?W?(?:{row.pattern})(?![0-9])", name, re.IGNORECASE):
            return row.gfx
    return None


def product_name(ids_text: str, device: str, revision: str) -> str | None:
    """Return the product name from the text of an ``amdgpu.ids`` file, or None if the file lacks it.

    ``device`` ("744c") and ``revision`` ("c8") are hexadecimal without 0x.
    """
    wanted = (device.lower(), revision.lower().zfill(2))
    for line in ids_text.splitlines():
        parts = [part.strip() for part in line.split(",", 2)]
        if len(parts) == 3 and (parts[0].lower(), parts[1].lower()) == wanted:
            return parts[2]
    return None


def address_of(properties: Any) -> str | None:
    """Return a GPU's PCI address as sysfs writes it ("0000:03:00.0"), or None if this torch does not report it.

    properties: the GPU's properties from torch.
    """
    parts: list[int | None] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    return "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == len(parts) else None
