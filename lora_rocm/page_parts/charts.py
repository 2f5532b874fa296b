"""Charts: lines on common axes, as data for ``static/chart.js`` and as a still SVG where no script runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

WIDTH_PX, HEIGHT_PX = 760, 260
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 24, 12, 44
STILL_POINTS, LIVE_POINTS = 300, 1500
"""Points of each line in the SVG, and in the data."""
MAX_POINTS = 8192

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. kind: its style (raw, smooth, plain, dots), which ``chart.js`` and ``page.css`` define."""

    name: str
    points: Sequence[Point]
    kind: str = "plain"


@dataclass(frozen=True)
class Chart:
    """Several lines with common axes. Non-finite points are omitted."""

    title: str
    x_label: str
    series: Sequence[Series]

    @cached_property
    def lines(self) -> list[Series]:
        """The lines that have points."""
        finite = [Series(one.name, _finite(one.points), one.kind) for one in self.series]
        return [one for one in finite if one.points]

    @property
    def data(self) -> str:
        """The chart as JSON, which ``chart.js`` reads."""
        lines = []
        for one in self.lines:
            points = reduced(one.points, LIVE_POINTS)
            values = {"x": [_short(x, 9) for x, _ in points], "y": [_short(y, 5) for _, y in points]}
            lines.append({"label": one.name, "kind": one.kind, **values})
        return json.dumps({"title": self.title, "xLabel": self.x_label, "lines": lines}, separators=(",", ":"))

    @property
    def still(self) -> Markup:
        """The chart as an ``<svg>``; empty if there are no finite points."""
        lines = [Series(one.name, reduced(one.points, STILL_POINTS), one.kind) for one in self.lines]
        return _drawn(self.title, lines, self.x_label) if lines else Markup()


def reduced(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Return at most about ``most`` points: of each stretch of the curve its lowest and its highest.

    So no peak disappears, also in a long run. The first and the last point are kept.
    """
    most = min(max(most, 4), MAX_POINTS)
    if len(points) <= most:
        return points
    kept, stretches, inner = [points[0]], most // 2 - 1, len(points) - 2
    for number in range(stretches):
        part = range(1 + number * inner // stretches, 1 + (number + 1) * inner // stretches)
        low = min(part, key=lambda at: points[at][1])
        high = max(part, key=lambda at: points[at][1])
        kept += [points[at] for at in sorted({low, high})]
    return [*kept, points[-1]]


def _drawn(title: str, lines: Sequence[Series], x_label: str) -> Markup:
    points = [point for one in lines for point in one.points]
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _span([y for _, y in points])

    def x_px(x: float) -> float:
        return LEFT_PX + (x - x_low) / (x_high - x_low) * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def y_px(y: float) -> float:
        return HEIGHT_PX - BOTTOM_PX - (y - y_low) / (y_high - y_low) * (HEIGHT_PX - TOP_PX - BOTTOM_PX)

    # Grid and labels of the axes
    parts = list[Markup]()
    for y in ticks(y_low, y_high):
        at = y_px(y)
        line = {"x1": LEFT_PX, "x2": WIDTH_PX - RIGHT_PX, "y1": f"{at:.1f}", "y2": f"{at:.1f}"}
        parts.append(_element("line", {"class": "axis", **line}))
        parts.append(_element("text", {"x": LEFT_PX - 6, "y": f"{at + 4:.1f}", "text-anchor": "end"}, [f"{y:.4g}"]))
    below = {"y": HEIGHT_PX - BOTTOM_PX + 18, "text-anchor": "middle"}
    parts += [_element("text", {"x": f"{x_px(x):.1f}", **below}, [f"{x:.6g}"]) for x in ticks(x_low, x_high)]
    lowest = {"x": WIDTH_PX / 2, "y": HEIGHT_PX - 4, "text-anchor": "middle"}
    parts.append(_element("text", lowest, [x_label]))
    # Lines and dots
    for one in lines:
        if one.kind == "dots" or len(one.points) == 1:
            places = [{"cx": f"{x_px(x):.1f}", "cy": f"{y_px(y):.1f}"} for x, y in one.points]
            parts += [_element("circle", {"class": one.kind, **place, "r": 3}) for place in places]
        if len(one.points) > 1:
            path = " ".join(f"{x_px(x):.1f},{y_px(y):.1f}" for x, y in one.points)
            parts.append(_element("polyline", {"class": one.kind, "points": path}))
    box = {"viewBox": f"0 0 {WIDTH_PX} {HEIGHT_PX}", "role": "img", "aria-label": title}
    return _element("svg", box, parts)


def _element(name: str, attributes: Mapping[str, object], content: Iterable[str] = ()) -> Markup:
    """Return an SVG element. Markup is only created here: ``Markup.format`` and ``Markup.join`` escape all text."""
    written = Markup().join(Markup(' {}="{}"').format(key, value) for key, value in attributes.items())
    inside = Markup().join(content)
    if not inside:
        return Markup("<{}{}/>").format(name, written)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, inside)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """At least one, and about ``wanted``, round numbers from ``low`` to ``high`` (low < high)."""
    raw = (high - low) / wanted
    if raw < sys.float_info.min:  # a span of numbers near the smallest one, which has no logarithm or an inexact one
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def _short(value: float, digits: int) -> float:
    """Return a number with few digits, without a decimal point if it needs none."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, moved apart if they are equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high
