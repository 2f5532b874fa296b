"""Averages of noisy series."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.report.figures import Smoothed


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0.0, 0.99))
def test_stays_within_the_values(values: list[float], weight: float) -> None:
    smoothed = Smoothed(weight)
    for value in values:
        smoothed.add(value)
    assert smoothed.value is not None
    assert min(values) - 1e-3 <= smoothed.value <= max(values) + 1e-3


def test_the_start_does_not_pull() -> None:
    assert Smoothed(0.97).add(5.0) == pytest.approx(5.0)


def test_what_is_not_finite_is_passed_over() -> None:
    smoothed = Smoothed()
    assert smoothed.add(math.nan) is None
    smoothed.add(1.0)
    assert smoothed.add(math.inf) == pytest.approx(1.0)
