"""Reads AMD GPUs on Linux from files of the kernel: sysfs, hwmon, and the DRM clients of processes.

Reading most of these files wakes a sleeping card, and the first values are then wrong. ``power/runtime_status`` does
not wake it and is therefore read first. ``gpu_busy_percent`` is not read, because it is 100 as long as a compute
context exists. Sources: kernel docs, gpu/amdgpu/thermal and gpu/drm-usage-stats; ROCm/rocm-systems#8024;
ROCm/amdgpu#221.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.rundir.event_types import TelemetryEvent
from lora_rocm.telemetry import reader

PCI_DEVICES, PROC = "sys/bus/pci/devices", "proc"
AWAKE = ("active", "unsupported")
"""Values of ``runtime_status`` with which reading does not wake the card (kernel docs, power/runtime_pm)."""
READ_BYTES = 1 << 16
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CLIENT_LINE = re.compile(r"^([a-z]+-[\w-]+):\s*(\S+)(?:[ \t]+([KMG]iB))?[ \t]*$", re.MULTILINE)
LEFT = (errno.ENOENT, errno.ESRCH)
"""Errors that mean that a process has ended, or a file has been removed, during the reading."""


@dataclass
class _Files:
    """The files in the folder of one GPU. ``unread``: for each value that could not be read, the reason."""

    folder: Path
    unread: dict[str, str] = field(default_factory=dict)

    def text(self, name: str, what: str) -> str | None:
        """Return a file's text, or None if the file is missing or unreadable. Only an unreadable file is recorded."""
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                return file.read(READ_BYTES).decode("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.unread[what] = _why(error)
            return None

    def number(self, name: str, what: str, divisor: float = 1) -> float | None:
        text = self.text(name, what)
        if text is None:
            return None
        try:
            return int(text) / divisor
        except ValueError:
            self.unread[what] = f"not a number in {name}: {text[:40]!r}"
            return None

    def first(self, names: tuple[str, ...], what: str, divisor: float = 1) -> float | None:
        """Return the number in the first of these files that has one, divided by ``divisor``; None if none has."""
        for name in names:
            if (found := self.number(name, what, divisor)) is not None:
                return found
        self.unread.setdefault(what, reader.ABSENT)
        return None

    def names(self, name: str, what: str) -> list[str]:
        try:
            return sorted(os.listdir(self.folder / name))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            self.unread[what] = _why(error)
            return []


class SysfsReader:
    """Reads the GPUs with these PCI addresses.

    Args:
        root: root of the file system.
        addresses: PCI addresses as the kernel writes them, "0000:03:00.0".
        pids: function that returns the run's process ids.
    """

    def __init__(self, root: Path, addresses: tuple[str, ...], pids: reader.Pids) -> None:
        self._root, self._addresses, self._pids = root, addresses, pids

    def read(self) -> list[TelemetryEvent]:
        return [self._read(address, number) for number, address in enumerate(self._addresses)]

    def _read(self, address: str, number: int) -> TelemetryEvent:
        files = _Files(self._root / PCI_DEVICES / address)
        status = files.text("power/runtime_status", reader.CARD)
        if not files.folder.is_dir():
            return reader.reading(address, number, {reader.CARD: "its files are missing"})
        if reader.CARD in files.unread:  # unknown whether it sleeps
            return reader.reading(address, number, files.unread)
        if status is not None and status not in AWAKE:
            return reader.reading(address, number, {}, asleep=True)
        values: dict[str, object] = {
            "memory_bytes": files.first(("mem_info_vram_used",), reader.MEMORY),
            "memory_total_bytes": files.first(("mem_info_vram_total",), reader.MEMORY),
            "main_bytes": files.first(("mem_info_gtt_used",), reader.MAIN_MEMORY),
            **_sensors(files),
            **self._own(address, files.unread),
        }
        return reader.reading(address, number, files.unread, **values)

    def _own(self, address: str, unread: dict[str, str]) -> dict[str, object]:
        """Return the memory of the run's processes on this GPU.

        A DRM client counts once, even if several files show it.
        """
        clients: dict[str, dict[str, int]] = {}
        for pid in self._pids():
            for text in self._fdinfo(pid, unread):
                found = {key: (value, unit) for key, value, unit in CLIENT_LINE.findall(text)}
                if found.get("drm-pdev", ("", ""))[0] == address and "drm-client-id" in found:
                    clients[found["drm-client-id"][0]] = {
                        key: int(value) * UNITS[unit] for key, (value, unit) in found.items() if value.isdecimal()
                    }
        if not clients:
            unread.setdefault(reader.OWN_MEMORY, reader.ABSENT)
            return {}
        moved = [client["amd-evicted-vram"] for client in clients.values() if "amd-evicted-vram" in client]
        return {
            "own_bytes": sum(_region(client, "vram") for client in clients.values()),
            "own_main_bytes": sum(_region(client, name) for client in clients.values() for name in ("gtt", "cpu")),
            "moved_bytes": sum(moved) if moved else None,
        }

    def _fdinfo(self, pid: int, unread: dict[str, str]) -> Iterator[str]:
        folder = self._root / PROC / str(pid) / "fdinfo"
        try:
            names = os.listdir(folder)
        except OSError as error:
            if error.errno not in LEFT:
                unread[reader.OWN_MEMORY] = _why(error)
            return
        for name in names:
            try:
                with (folder / name).open("rb", buffering=0) as file:
                    text = file.read(READ_BYTES).decode("utf-8", "replace")
            except OSError as error:
                if error.errno not in LEFT:
                    unread[reader.OWN_MEMORY] = _why(error)
                continue
            if "drm-client-id" in text:
                yield text


def _sensors(files: _Files) -> dict[str, object]:
    """Return temperatures, their limits, and power from the GPU's hwmon folder."""
    temperatures: dict[str, float] = {}
    limits: dict[str, float] = {}
    found: dict[str, object] = {"temperatures_c": temperatures, "limits_c": limits}
    for chip in files.names("hwmon", reader.TEMPERATURE):
        folder = f"hwmon/{chip}"
        for name in files.names(folder, reader.TEMPERATURE):
            if match := re.fullmatch(r"(temp\d+)_input", name):
                sensor = f"{folder}/{match.group(1)}"
                value = files.number(f"{sensor}_input", reader.TEMPERATURE, 1e3)
                if value is None:
                    continue
                label = files.text(f"{sensor}_label", reader.TEMPERATURE) or match.group(1)
                temperatures[label] = value
                if limit := files.number(f"{sensor}_crit", reader.TEMPERATURE, 1e3):
                    limits[label] = limit
        power = (f"{folder}/power1_average", f"{folder}/power1_input")
        found["power_w"] = files.first(power, reader.POWER, 1e6)
        found["power_cap_w"] = files.first((f"{folder}/power1_cap",), reader.POWER_CAP, 1e6)
    if not temperatures:
        files.unread.setdefault(reader.TEMPERATURE, reader.ABSENT)
    if "power_w" not in found:
        files.unread.setdefault(reader.POWER, reader.ABSENT)
    return found


def _region(client: dict[str, int], name: str) -> int:
    """Return the resident bytes of a memory region. Older kernels report them with another key."""
    keys = (f"drm-resident-{name}", f"drm-memory-{name}", f"drm-total-{name}")
    return next((client[key] for key in keys if key in client), 0)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
