"""Curves of a run for a chart: the whole run, reduced to the width of the chart, as float32 numbers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from lora_rocm.errors import UserError
from lora_rocm.page_parts.charts import Point
from lora_rocm.rundir.event_types import ValidationEvent
from lora_rocm.rundir.run_view import RunView

Curve = Sequence[tuple[int, float]]

FIELDS = ("loss", "learning_rate", "memory_bytes", "step_s", "grad_norm")
"""Fields of steps that have a chart."""
HELD_OUT = "held_out"


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


def to_bytes(curve: Sequence[Point]) -> bytes:
    """Return all steps and then all values, as float32 in little-endian order."""
    numbers = array("f", [float(updates) for updates, _ in curve] + [value for _, value in curve])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
