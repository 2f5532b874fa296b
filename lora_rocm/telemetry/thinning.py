"""Summarises readings, so that the event file of a long run stays small: about 2 MB for one GPU in a week."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lora_rocm.rundir.event_types import TelemetryEvent

FIRST_GAP_S, LAST_GAP_S, AGE_PER_GAP = 30.0, 300.0, 1000.0
"""Shortest and longest time between two events, in seconds.

In between, it is the run's age divided by ``AGE_PER_GAP``.
"""


class Thinned:
    """Collects the readings of one GPU. The first one becomes an event at once; later ones are summarised."""

    def __init__(self) -> None:
        self._waiting: list[TelemetryEvent] = []
        self._first_s: float | None = None
        self._last_s = float("-inf")

    def add(self, reading: TelemetryEvent, now_s: float) -> TelemetryEvent | None:
        """Add a reading; return the summary of the pending readings if it is time for an event, else None."""
        self._first_s = now_s if self._first_s is None else self._first_s
        self._waiting.append(reading)
        gap_s = min(max((now_s - self._first_s) / AGE_PER_GAP, FIRST_GAP_S), LAST_GAP_S)
        if now_s - self._last_s < gap_s:
            return None
        self._last_s = now_s
        return self.rest()

    def rest(self) -> TelemetryEvent | None:
        """Return the summary of the pending readings and remove them; None if there are none."""
        waiting, self._waiting = self._waiting, []
        return summary(waiting) if waiting else None


def summary(readings: Sequence[TelemetryEvent]) -> TelemetryEvent:
    """Return one event for several readings of a GPU, with highest temperatures and memory, and mean power."""
    last = readings[-1]

    def over(name: str, of: Callable[[list[float]], float]) -> float | None:
        values = [value for each in readings if (value := getattr(each, name)) is not None]
        return of(values) if values else None

    temperatures: dict[str, float] = {}
    for each in readings:
        for sensor, value in each.temperatures_c.items():
            temperatures[sensor] = max(value, temperatures.get(sensor, value))
    highest = ("memory_bytes", "own_bytes", "own_main_bytes", "main_bytes", "moved_bytes")
    changes = {
        "samples": sum(each.samples for each in readings),
        "asleep": all(each.asleep for each in readings),
        "temperatures_c": temperatures,
        "limits_c": {sensor: value for each in readings for sensor, value in each.limits_c.items()},
        "power_w": over("power_w", lambda values: sum(values) / len(values)),
        "power_cap_w": over("power_cap_w", lambda values: values[-1]),
        "memory_total_bytes": over("memory_total_bytes", lambda values: values[-1]),
        "slowed_by": list(dict.fromkeys(reason for each in readings for reason in each.slowed_by)),
        "unread": {what: why for each in readings for what, why in each.unread.items()},
        **{name: over(name, max) for name in highest},
    }
    return last.model_copy(update=changes)
