"""SVG line plots."""

import math
import re
from xml.etree import ElementTree

from hypothesis import assume, given
from hypothesis import strategies as st

from lora_rocm.page_parts.charts import HEIGHT_PX, MAX_POINTS, WIDTH_PX, Series, line_plot, thinned, ticks

ANY = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(st.tuples(st.floats(0, 1e6), ANY), max_size=30))
def test_any_values_give_a_plot_inside_its_frame(points: list[tuple[float, float]]) -> None:
    svg = line_plot([Series("a & <b>", points, "dots")], "step")
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        assert svg == ""
        return
    root = ElementTree.fromstring(svg)
    circles = [element for element in root if element.tag == "circle"]
    assert len(circles) == len(finite)
    for circle in circles:
        assert -1 <= float(circle.attrib["cx"]) <= WIDTH_PX + 1 and -1 <= float(circle.attrib["cy"]) <= HEIGHT_PX + 1


def test_higher_values_are_higher_up() -> None:
    svg = line_plot([Series("loss", [(0, 1.0), (1, 3.0), (2, 2.0)])], "step")
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
def test_thinned_keeps_both_ends(count: int) -> None:
    points = [(float(n), 0.0) for n in range(count)]
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 1
    assert not points or (kept[0], kept[-1]) == (points[0], points[-1])
