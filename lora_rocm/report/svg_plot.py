"""Line plots as SVG text without scripts; colours come from the page (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH_PX, HEIGHT_PX = 760, 260
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 12, 12, 44
MAX_POINTS = 1500

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line. kind: CSS class (raw, smooth, plain, dots). Non-finite points are left out."""

    name: str
    points: Sequence[Point]
    kind: str = "plain"


def line_plot(series: Sequence[Series], x_label: str) -> str:
    """An ``<svg>`` of several lines on common axes; an empty string without finite points."""
    kept = [Series(one.name, thinned(_finite(one.points)), one.kind) for one in series]
    points = [point for one in kept for point in one.points]
    if not points:
        return ""
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _span([y for _, y in points])

    def x_px(x: float) -> float:
        return LEFT_PX + (x - x_low) / (x_high - x_low) * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def y_px(y: float) -> float:
        return HEIGHT_PX - BOTTOM_PX - (y - y_low) / (y_high - y_low) * (HEIGHT_PX - TOP_PX - BOTTOM_PX)

    parts = [f'<svg viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" role="img" aria-label="{escape(series[0].name)}">']
    for y in ticks(y_low, y_high):
        at = y_px(y)
        parts.append(f'<line class="grid" x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT_PX - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    x_text = f'y="{HEIGHT_PX - BOTTOM_PX + 18}" text-anchor="middle"'
    parts += [f'<text x="{x_px(x):.1f}" {x_text}>{x:.6g}</text>' for x in ticks(x_low, x_high)]
    parts.append(f'<text x="{WIDTH_PX / 2}" y="{HEIGHT_PX - 4}" text-anchor="middle">{escape(x_label)}</text>')
    for one in kept:
        if one.kind == "dots" or len(one.points) == 1:
            parts += [
                f'<circle class="{one.kind}" cx="{x_px(x):.1f}" cy="{y_px(y):.1f}" r="3"/>' for x, y in one.points
            ]
        if len(one.points) > 1:
            path = " ".join(f"{x_px(x):.1f},{y_px(y):.1f}" for x, y in one.points)
            parts.append(f'<polyline class="{one.kind}" points="{path}"/>')
    return "".join([*parts, "</svg>"])


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about MAX_POINTS points, evenly chosen, always including the last."""
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About ``wanted`` round numbers within ``low`` to ``high`` (low < high), at least one."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """(lowest, highest), spread apart if they are equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high
