"""Curves of a run for a chart: the whole run, reduced to the width of the chart, as float32 numbers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from lora_rocm.errors import UserError
from lora_rocm.report.figures import Smoothed
from lora_rocm.rundir.event_types import ValidationEvent
from lora_rocm.rundir.run_view import RunView

Curve = Sequence[tuple[int, float]]

FIELDS = ("loss", "learning_rate", "memory_bytes", "step_s", "grad_norm")
"""Fields of steps that have a chart."""
HELD_OUT = "held_out"
MAX_POINTS = 8192


def curve_of(view: RunView, field: str) -> Curve:
    """Return a curve of the whole run.

    Raises:
        UserError: no-curve: there is no such field.
    """
    if field == HELD_OUT:
        return [(event.updates, event.loss) for event in view.all(ValidationEvent) if event.loss is not None]
    if field not in FIELDS:
        fix = f"Choose one of {', '.join((*FIELDS, HELD_OUT))}."
        raise UserError("no-curve", "There is no curve with this name.", where=field[:100], fix=fix)
    return view.steps.curve(field)


def smoothed(curve: Curve, weight: float) -> Curve:
    """Return the moving average of a curve. weight: share of the old average, from 0 (none) to below 1."""
    average = Smoothed(weight)
    return [(updates, value) for updates, raw in curve if (value := average.add(raw)) is not None]


def reduced(curve: Curve, points: int) -> Curve:
    """Return at most about ``points`` points: of each stretch of the curve its lowest and its highest.

    So no peak disappears, also in a long run. The first and the last point are kept.
    """
    points = min(max(points, 4), MAX_POINTS)
    if len(curve) <= points:
        return curve
    kept, stretches, inner = [curve[0]], points // 2 - 1, len(curve) - 2
    for number in range(stretches):
        part = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        low = min(part, key=lambda at: curve[at][1])
        high = max(part, key=lambda at: curve[at][1])
        kept += [curve[at] for at in sorted({low, high})]
    return [*kept, curve[-1]]


def to_bytes(curve: Curve) -> bytes:
    """Return all steps and then all values, as float32 in little-endian order."""
    numbers = array("f", [float(updates) for updates, _ in curve] + [value for _, value in curve])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
