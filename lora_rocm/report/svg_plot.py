"""Line plots as SVG without scripts. The page defines the colours (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH_PX, HEIGHT_PX = 760, 260
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 12, 12, 44
MAX_POINTS = 1500

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a plot. kind: CSS class (raw, smooth, plain or dots). Non-finite points are omitted."""

    name: str
    points: Sequence[Point]
    kind: str = "plain"


def line_plot(series: Sequence[Series], x_label: str) -> Markup:
    """Return an ``<svg>`` with several lines on common axes; empty if there are no finite points."""
    kept = [Series(one.name, thinned(_finite(one.points)), one.kind) for one in series]
    points = [point for one in kept for point in one.points]
    if not points:
        return Markup()
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
        parts.append(_element("line", {"class": "grid", **line}))
        parts.append(_element("text", {"x": LEFT_PX - 6, "y": f"{at + 4:.1f}", "text-anchor": "end"}, [f"{y:.4g}"]))
    below = {"y": HEIGHT_PX - BOTTOM_PX + 18, "text-anchor": "middle"}
    parts += [_element("text", {"x": f"{x_px(x):.1f}", **below}, [f"{x:.6g}"]) for x in ticks(x_low, x_high)]
    lowest = {"x": WIDTH_PX / 2, "y": HEIGHT_PX - 4, "text-anchor": "middle"}
    parts.append(_element("text", lowest, [x_label]))
    # Lines and dots
    for one in kept:
        if one.kind == "dots" or len(one.points) == 1:
            places = [{"cx": f"{x_px(x):.1f}", "cy": f"{y_px(y):.1f}"} for x, y in one.points]
            parts += [_element("circle", {"class": one.kind, **place, "r": 3}) for place in places]
        if len(one.points) > 1:
            path = " ".join(f"{x_px(x):.1f},{y_px(y):.1f}" for x, y in one.points)
            parts.append(_element("polyline", {"class": one.kind, "points": path}))
    box = {"viewBox": f"0 0 {WIDTH_PX} {HEIGHT_PX}", "role": "img", "aria-label": series[0].name}
    return _element("svg", box, parts)


def _element(name: str, attributes: Mapping[str, object], content: Iterable[str] = ()) -> Markup:
    """Return an SVG element. Markup is only created here: ``Markup.format`` and ``Markup.join`` escape all text."""
    written = Markup().join(Markup(' {}="{}"').format(key, value) for key, value in attributes.items())
    inside = Markup().join(content)
    if not inside:
        return Markup("<{}{}/>").format(name, written)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, inside)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Reduce points to at most about MAX_POINTS, evenly chosen and including the last."""
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """At least one, and about ``wanted``, round numbers from ``low`` to ``high`` (low < high)."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, moved apart if they are equal."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high
