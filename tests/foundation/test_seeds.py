from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.foundation.seeds import draw, drawer, fraction


def test_draw_is_the_same_on_every_machine() -> None:
    assert draw("flip", 0, 1, "a.png") == 14350448803172446494


def test_every_part_counts() -> None:
    draws = {draw("a", 1, 2), draw("b", 1, 2), draw("a", 2, 1), draw("a", 1), draw("a", 12), draw("a", "1", 2)}
    assert len(draws) == 6


def test_names_that_are_not_utf8_are_drawn_for_too() -> None:
    assert draw("\udcff") != draw("\udcfe")


def test_fraction_is_spread_evenly_and_below_one() -> None:
    values = [fraction("x", number) for number in range(4000)]
    assert 0.0 <= min(values) < 0.01 and 0.99 < max(values) < 1.0
    assert 0.48 < sum(values) / len(values) < 0.52


parts = st.lists(st.text(st.characters(codec=None)) | st.integers(), min_size=1, max_size=4)


@given(parts, parts)
def test_a_drawer_draws_the_same(first: list[int | str], more: list[int | str]) -> None:
    assert drawer(*first)(*more) == draw(*first, *more)
