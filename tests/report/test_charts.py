"""Charts: still, and as data."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lora_rocm.page_parts.charts import HEIGHT_PX, LIVE_POINTS, WIDTH_PX, Chart, Series, reduced, ticks

ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(st.floats(0, 1e6), ANY), max_size=30))
@example([(0.0, 0.0), (5e-324, 0.0)])
def test_any_values_give_a_plot_inside_its_frame(points: list[tuple[float, float]]) -> None:
    chart = Chart("a & <b>", "step", [Series("a & <b>", points, "dots")])
    svg = chart.still
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        assert svg == "" and json.loads(chart.data)["lines"] == []
        return
    (line,) = json.loads(chart.data)["lines"]
    assert line["y"] == pytest.approx([y for _, y in finite], rel=1e-4) and len(line["x"]) == len(finite)
    root = ElementTree.fromstring(svg)
    circles = [element for element in root if element.tag == "circle"]
    assert len(circles) == len(finite)
    for circle in circles:
        assert -1 <= float(circle.attrib["cx"]) <= WIDTH_PX + 1 and -1 <= float(circle.attrib["cy"]) <= HEIGHT_PX + 1


def test_higher_values_are_higher_up() -> None:
    svg = Chart("loss", "step", [Series("loss", [(0, 1.0), (1, 3.0), (2, 2.0)])]).still
    found = re.search(r'<polyline class="plain" points="([^"]+)"', svg)
    assert found is not None
    heights = [float(pair.partition(",")[2]) for pair in found.group(1).split()]
    assert heights[1] < heights[2] < heights[0]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    assume(low + span > low and span > abs(low) * 1e-6)
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 7
    assert all(low - span * 1e-6 <= tick <= low + span * (1 + 1e-6) for tick in found)


@given(st.integers(0, 20_000))
def test_reduced_keeps_both_ends(count: int) -> None:
    points = [(float(n), 0.0) for n in range(count)]
    kept = reduced(points, LIVE_POINTS)
    assert len(kept) <= LIVE_POINTS
    assert not points or (kept[0], kept[-1]) == (points[0], points[-1])


def test_no_peak_disappears() -> None:
    points = [(n, 9.0 if n == 7777 else 1.0) for n in range(20_000)]
    chart = Chart("loss", "step", [Series("loss", points)])
    (line,) = json.loads(chart.data)["lines"]
    assert max(line["y"]) == 9 and line["x"][line["y"].index(9)] == 7777
