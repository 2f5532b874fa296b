"""Chooses how a run's GPUs are read, from facts alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import Selection, visible

Method = Literal["sysfs", "pdh", "nvml"]
EVERY_S = 5.0
"""Seconds between two readings. It is not less, because each reading may query the GPU's own controller."""
EXPLAINED = 3
"""Exit code of the reading process if it has already reported why it ends."""


@dataclass(frozen=True)
class Cards:
    """The GPUs of a run.

    Attributes:
        method: source of the readings: sysfs (Linux, AMD), pdh (Windows) or nvml (NVIDIA).
        addresses: PCI addresses for sysfs; empty for the other methods, which find the GPUs by the run's processes.
        count: number of GPUs that the run uses; 0 means all.
        total_bytes: memory of each card, if ``method`` does not report it.
        spills: sign that memory does not fit on the card. With "moved", the driver counts the bytes that it moved. With
            "shared", main memory that the run's processes share with the GPU grows. It is "" if memory cannot spill, or
            this is unknown.
    """

    method: Method
    addresses: tuple[str, ...] = ()
    count: int = 1
    total_bytes: int | None = None
    spills: Literal["moved", "shared", ""] = ""


@dataclass(frozen=True)
class TelemetryJob:
    """The job of the reading process (``telemetry.reader_child``).

    Attributes:
        pids: process ids of the run. Their child processes are included.
        root: folder that replaces the root of the file system.
    """

    cards: Cards
    pids: tuple[int, ...] = ()
    every_s: float = EVERY_S
    root: str = "/"

    @classmethod
    def from_text(cls, text: str) -> TelemetryJob:
        fields = json.loads(text)  # json: a job or an answer of another process of the same start
        cards = Cards(**{**fields["cards"], "addresses": tuple(fields["cards"]["addresses"])})
        return cls(cards, tuple(fields["pids"]), fields["every_s"], fields["root"])

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def cards_of(
    facts: HostFacts, selection: Selection, environ: Mapping[str, str], device: str, count: int = 1
) -> Cards | str:
    """Return the cards to read, or a sentence with the reason why none is read.

    The sentence is empty if the run uses no GPU.

    Args:
        facts: facts about the machine.
        selection: AMD GPUs of the run.
        environ: environment variables, which may limit the visible GPUs.
        device: value of ``runtime.device``.
        count: number of processes on this machine, each with its own GPU.
    """
    torch = facts.torch
    if device == "cpu" or torch is None or (torch.hip is None and torch.cuda is None):
        return ""
    if torch.hip is None:
        has_nvidia = any(gpu.vendor == "nvidia" for gpu in facts.gpus)
        return Cards("nvml", count=count) if has_nvidia else ""
    if selection.gpu is None:
        return ""
    gpus = selection.gpus or (selection.gpu,)
    if facts.system == "windows":
        total = {gpu.vram_bytes for gpu in gpus}
        # an APU with little dedicated memory works in shared memory, so nothing spills (``memory_budget``)
        half_bytes = facts.memory_bytes // 2 if facts.memory_bytes is not None else None
        enough = all(
            gpu.integrated is False or (half_bytes is not None and (gpu.vram_bytes or 0) >= half_bytes) for gpu in gpus
        )
        return Cards("pdh", (), count, total.pop() if len(total) == 1 else None, "shared" if enough else "")
    if facts.is_wsl:
        return "Temperature, power and memory of the GPU are not read under WSL: Linux has no files about it there."
    addresses = tuple(gpu.pci_address for gpu in gpus if gpu.pci_address is not None)
    by_uuid = selection.by_user and visible(facts, environ) is None and len(facts.amd_gpus) > 1
    if by_uuid or len(addresses) < count:
        return "Temperature, power and memory of the GPU are not read: it is unknown which GPU the run uses."
    discrete = all(gpu.integrated is False for gpu in gpus)
    return Cards("sysfs", addresses[:count], count, None, "moved" if discrete else "")
