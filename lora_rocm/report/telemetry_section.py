"""The report's section about temperature, power and memory of the GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.page_parts.charts import Point, Series
from lora_rocm.page_parts.texts import t
from lora_rocm.report.html import Block, Heading, Paragraph, ReportBox, plot, section, table
from lora_rocm.rundir.event_types import AlarmEvent, TelemetryEvent

MAX_ALARMS = 20
SIZES = {
    "memory_bytes": "memory of the card, all programs",
    "own_bytes": "memory of the card, this run",
    "own_main_bytes": "main memory for the GPU, this run",
    "moved_bytes": "moved by the driver to main memory",
}
ABOUT = "Readings are summarised: temperatures and memory are the highest of each summary, power is its mean."


def telemetry_section(readings: Sequence[TelemetryEvent], alarms: Sequence[AlarmEvent]) -> ReportBox | None:
    """Warnings, and a table and plots for each GPU; None if there are no ``telemetry`` or ``alarm`` events."""
    by_gpu = defaultdict[str, list[TelemetryEvent]](list)
    for reading in readings:
        by_gpu[reading.gpu].append(reading)
    parts: list[Block | None] = [
        Paragraph(f"At step {event.updates}: {event.text}", "bad") for event in alarms[:MAX_ALARMS]
    ]
    if len(alarms) > MAX_ALARMS:
        parts.append(Paragraph(f"... and {count_text(len(alarms) - MAX_ALARMS, 'more warning')}"))
    for gpu, of_gpu in by_gpu.items():
        parts += _about_gpu(gpu, of_gpu)
    return section(t("report.gpu"), *parts, Paragraph(ABOUT, "soft") if by_gpu else None)


def _about_gpu(gpu: str, events: Sequence[TelemetryEvent]) -> Iterator[Block | None]:
    yield Heading(f"{gpu}, {count_text(sum(event.samples for event in events), 'reading')}")
    sensors = dict.fromkeys(sensor for event in events for sensor in event.temperatures_c)
    rows = [
        _row(f"temperature {sensor}", [event.temperatures_c.get(sensor) for event in events], "{:.0f} °C".format)
        for sensor in sensors
    ]
    rows.append(_row("power", [event.power_w for event in events], "{:.0f} W".format))
    rows += [_row(what, [getattr(event, field) for event in events], size_text) for field, what in SIZES.items()]
    yield table(("", "lowest", "mean", "highest"), [row for row in rows if row])
    last = events[-1]
    limits = [f"{sensor} {limit:.0f} °C" for sensor, limit in last.limits_c.items()]
    notes = [f"critical temperature: {', '.join(limits)}"] if limits else []
    notes += [f"power limit: {last.power_cap_w:.0f} W"] if last.power_cap_w is not None else []
    notes += [f"memory: {size_text(last.memory_total_bytes)}"] if last.memory_total_bytes is not None else []
    yield Paragraph("; ".join(notes)) if notes else None
    unread = {what: why for event in events for what, why in event.unread.items()}
    listed = "; ".join(f"{what} ({why})" for what, why in unread.items())
    yield Paragraph(f"Not read: {listed}", "soft") if unread else None
    hottest = [max(event.temperatures_c.values(), default=None) for event in events]
    yield from _plot("Hottest sensor, °C", events, hottest)
    yield from _plot("Power, W", events, [event.power_w for event in events])


def _row(name: str, found: Sequence[float | None], text: Callable[[float], str]) -> tuple[str, ...] | None:
    values = [value for value in found if value is not None]
    if not values:
        return None
    return name, text(min(values)), text(sum(values) / len(values)), text(max(values))


def _plot(title: str, events: Sequence[TelemetryEvent], values: Sequence[float | None]) -> Iterator[Block | None]:
    began_s = events[0].time
    points: list[Point] = [
        ((event.time - began_s) / 60, value) for event, value in zip(events, values, strict=True) if value is not None
    ]
    if len(points) > 1:
        yield plot(title, [Series(title, points)], t("report.minutes"))
