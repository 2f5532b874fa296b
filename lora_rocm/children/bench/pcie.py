"""Reads the PCIe link of a GPU from Linux' sysfs; other systems are not supported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys/bus/pci/devices")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Transfer rate of a lane in GT/s -> generation (PCI-SIG base specifications)."""


@dataclass(frozen=True)
class Link:
    """The narrowest link between a GPU and the processor. ``gb_per_s``: raw, one way, in 10^9 bytes a second."""

    address: str
    generation: int
    width: int
    gb_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def link_to(address: str, devices: Path = SYSFS) -> Link | None:
    """Return the link to the device at a PCI address ("0000:03:00.0"); None if it cannot be read.

    A Radeon has a switch of its own, whose inner link is always wide. So every bridge on the way counts, and the
    narrowest is the bus. Read it while the device works: an idle link runs slower.
    """
    try:
        device = (devices / address).resolve(strict=True)
    except OSError:
        return None
    found = [link for folder in (device, *device.parents) if (link := _link(folder, address)) is not None]
    return min(found, key=lambda link: link.gb_per_s, default=None)


def _link(folder: Path, address: str) -> Link | None:
    try:
        speed = (folder / "current_link_speed").read_text(encoding="utf-8")
        width = int((folder / "current_link_width").read_text(encoding="utf-8"))
        rate = float(speed.split()[0])  # "16.0 GT/s PCIe"
    except (OSError, ValueError, IndexError):
        return None
    generation = GENERATIONS.get(rate)
    if generation is None or width < 1:
        return None
    coded = 8 / 10 if generation <= 2 else 128 / 130 if generation <= 5 else 1.0
    return Link(address, generation, width, round(rate * width * coded / 8, 2))
