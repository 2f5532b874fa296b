"""Rows of several texts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.encoded_cache.prepare import rows_of


@given(st.lists(st.integers(1, 60), max_size=60))
def test_each_text_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = rows_of(lengths, 64)
    assert sorted(index for row in rows for index in row) == [*range(len(lengths))]
    assert all(row and sum(lengths[index] for index in row) <= 64 for row in rows)
    assert rows == rows_of(lengths, 64)
    if sum(lengths) > 64:  # two rows of half could have been one
        assert sum(sum(lengths[index] for index in row) <= 32 for row in rows) <= 1


def test_rows_are_full_where_they_can_be() -> None:
    assert rows_of([30, 34, 50, 14, 64], 64) == [[4], [2, 3], [1, 0]]
    assert rows_of([70, 3], 64) == [[0], [1]], "one that is too long is alone"
    many = [1 + index % 60 for index in range(6000)]
    assert len(rows_of(many, 2048)) <= sum(many) / 2048 * 1.01 + 1
