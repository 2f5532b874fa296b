"""Telemetry as named numbers for trackers, and as text for the user."""

from __future__ import annotations

from lora_rocm.foundation.units import size_text
from lora_rocm.rundir.event_types import TelemetryEvent

PLAIN = {
    "power_w": "power_w",
    "power_cap_w": "power_cap_w",
    "memory_bytes": "memory_bytes",
    "own_bytes": "own_memory_bytes",
    "own_main_bytes": "own_main_memory_bytes",
    "moved_bytes": "moved_memory_bytes",
}
"""Name in trackers of each telemetry field."""


def numbers_of(event: TelemetryEvent) -> dict[str, float]:
    """Return the values of a reading by their names in trackers, such as "telemetry/gpu0/power_w"."""
    found = {name: getattr(event, field) for field, name in PLAIN.items()}
    found |= {f"temperature_{sensor}_c": value for sensor, value in event.temperatures_c.items()}
    return {f"telemetry/gpu{event.number}/{name}": value for name, value in found.items() if value is not None}


def short_text(event: TelemetryEvent) -> str:
    """Return the highest temperature and the power as text ("61 °C, 210 W"); empty if neither was read."""
    temperatures = event.temperatures_c
    parts = [f"{max(temperatures.values()):.0f} °C"] if temperatures else []
    parts += [f"{event.power_w:.0f} W"] if event.power_w is not None else []
    return ", ".join(parts)


def long_text(event: TelemetryEvent) -> str:
    """Return all values read from a GPU as one line of text."""
    if event.asleep:
        return "asleep, not read"
    parts = [f"{sensor} {value:.0f} °C" for sensor, value in event.temperatures_c.items()]
    if event.power_w is not None:
        cap = f" of {event.power_cap_w:.0f}" if event.power_cap_w is not None else ""
        parts.append(f"{event.power_w:.0f}{cap} W")
    if event.memory_bytes is not None:
        total = f" of {size_text(event.memory_total_bytes)}" if event.memory_total_bytes is not None else ""
        parts.append(f"memory {size_text(event.memory_bytes)}{total}")
    if event.own_bytes is not None:
        parts.append(f"this run's {size_text(event.own_bytes)}")
    if event.own_main_bytes is not None:
        parts.append(f"main memory {size_text(event.own_main_bytes)}")
    parts += [f"slowed by {reason}" for reason in event.slowed_by]
    return ", ".join(parts) or "nothing could be read"
