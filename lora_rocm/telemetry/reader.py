"""Code shared by the readers of all systems: the structure of a reading, and the values that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from lora_rocm.rundir.event_types import TelemetryEvent

Pids = Callable[[], Iterable[int]]
"""Function that returns the current process ids of the run."""
ABSENT = "not offered by this GPU, driver or system"
TEMPERATURE, POWER, POWER_CAP = "temperature", "power", "power limit"
MEMORY, MAIN_MEMORY = "memory of the card", "main memory used by the GPU"
OWN_MEMORY, CARD = "memory of the run's processes", "the GPU"


class GpuReader(Protocol):
    """Reads the GPUs of a run at each call. A call may block, so only a separate process makes it."""

    def read(self) -> list[TelemetryEvent]: ...


def faults(event: TelemetryEvent) -> Iterator[tuple[str, str]]:
    """Yield (value's name, reason) for each value that could not be read although the system offers it."""
    yield from ((what, why) for what, why in event.unread.items() if why != ABSENT)


def reading(gpu: str, number: int, unread: dict[str, str], **values: object) -> TelemetryEvent:
    """Return one reading of one GPU. Values that are not passed are unknown.

    gpu: identifier of the GPU.
    unread: for each value that could not be read, the reason.
    """
    empty: dict[str, object] = {
        "updates": 0,
        "samples": 1,
        "asleep": False,
        "temperatures_c": {},
        "limits_c": {},
        "power_w": None,
        "power_cap_w": None,
        "memory_bytes": None,
        "memory_total_bytes": None,
        "own_bytes": None,
        "own_main_bytes": None,
        "main_bytes": None,
        "moved_bytes": None,
        "slowed_by": [],
    }
    return TelemetryEvent.model_validate({**empty, "gpu": gpu, "number": number, "unread": unread, **values})
