"""Figures of ``benchmarks/training_step`` as aligned text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lora_rocm.commands.bench_tables import PART_NAMES, aligned
from lora_rocm.foundation.units import size_text

Row = Mapping[str, Any]

STEP_LINES: tuple[tuple[str, Callable[[Row], float | None], str], ...] = (
    ("ms per step, median", lambda row: 1e3 * row["median_s"], ".1f"),
    ("ms per step, 95th percentile", lambda row: 1e3 * row["p95_s"], ".1f"),
    ("samples per step", lambda row: row["samples"], ".0f"),
    ("samples/s", lambda row: row["samples_per_s"], ".2f"),
    ("GPU busy, ms per step", lambda row: _times(row["profile"]["busy_s"], 1e3), ".1f"),
    ("GPU idle, ms per step", lambda row: _times(row.get("idle_s"), 1e3), ".1f"),
    ("kernels per step (CPU: operators)", lambda row: row["profile"]["kernels"], ",.0f"),
    ("of these copies and fills", lambda row: row["profile"]["copies"], ",.0f"),
    ("launches per step", lambda row: row["profile"]["launches"], ",.0f"),
    ("host waits per step", lambda row: row["profile"]["waits"], ".1f"),
    ("waits that PyTorch flags", lambda row: row.get("flagged_waits"), ".1f"),
    ("peak memory, tensors, GiB", lambda row: _times(row["peak_allocated_bytes"], 2**-30), ".2f"),
    ("peak memory, reserved, GiB", lambda row: _times(row["peak_reserved_bytes"], 2**-30), ".2f"),
    ("TFLOP a step", lambda row: _times(row.get("flops"), 1e-12), ".4g"),
    ("TFLOP/s", lambda row: _times(row.get("flops_per_s"), 1e-12), ".4g"),
    ("of a large product's rate, %", lambda row: _times(row.get("of_matmul"), 100), ".1f"),
)
"""Reported figures of a training step. Lines without any value (a GPU's lines, on a CPU) are omitted."""


def step_table(rows: Sequence[Row]) -> list[str]:
    """Return figures of training steps, one column per variant."""
    lines = [["", *(row["name"] for row in rows)]]
    for name, value, form in STEP_LINES:
        values = [value(row) for row in rows]
        if any(found is not None for found in values):
            lines.append([name, *("-" if found is None else format(found, form) for found in values)])
    return aligned(lines, left=1)


def parts_table(row: Row) -> list[str]:
    """Return the time of a step's parts. The parts do not add up: the host works ahead of the device."""
    lines = [
        [f"  {PART_NAMES.get(name, name)}", f"{1e3 * seconds:.2f} ms", f"{seconds / row['median_s']:.1%}"]
        for name, seconds in row["parts_s"].items()
    ]
    return aligned(lines, left=1)


def price_text(price: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """Return our trainer's cost over each bare loop, in a sentence each."""
    lines = []
    for name, found in price.items():
        parts = [f"{what} x {found[key]:.3f}" for key, what in PRICE_NAMES.items() if found[key] is not None]
        peak = found["peak_bytes"]
        memory = "" if peak is None else f", peak {'+' if peak >= 0 else '-'}{size_text(int(abs(peak)))}"
        lines.append(f"Beside {name}: {', '.join(parts)}{memory}.")
    return ["", *lines] if lines else []


PRICE_NAMES = {"wall": "time", "busy": "GPU busy", "kernels": "kernels"}


def kinds_table(rows: Sequence[Row]) -> list[str]:
    """Return time and number of kernels by kind, one column per variant."""
    kinds = dict.fromkeys(kind for row in rows for kind in row["profile"]["by_kind"])
    lines = [["", *(row["name"] for row in rows)]]
    for kind in kinds:
        found = [row["profile"]["by_kind"].get(kind, (0.0, 0.0)) for row in rows]
        lines.append([f"  {kind}", *(f"{1e3 * seconds:.2f} ({number:,.0f})" for seconds, number in found)])
    return aligned(lines, left=1)


def top_table(row: Row) -> list[str]:
    """Return the kernels with the longest total time."""
    return aligned([[f"  {name}", f"{1e3 * s:.2f} ms", f"{n:,.0f}"] for name, s, n in row["profile"]["top"]], left=1)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
