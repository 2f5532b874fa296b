"""Sequences that create their items on demand behave like lists."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset import columns
from lora_rocm.dataset.columns import FirstN, Lazy

any_text = st.text(st.characters(codec=None), max_size=12)  # also halves of letters, as names of files may have


@given(st.lists(any_text, max_size=9))
def test_few(names: list[str]) -> None:
    few = FirstN(3)
    for name in names:
        few.append(name)
    assert len(few) == len(names) and few[:3] == names[:3] and bool(few) == bool(names)


@given(st.lists(st.integers(), max_size=9), st.integers(-12, 12), st.slices(9))
@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_what_is_made_when_it_is_asked_for_is_asked_for_as_a_list(
    at_once: int, made: list[int], at: int, part: slice
) -> None:
    with patch.object(columns, "MADE_AT_ONCE", at_once):
        check_lazy(made, at, part)


def check_lazy(made: list[int], at: int, part: slice) -> None:
    class Made(Lazy[int]):
        def __len__(self) -> int:
            return len(made)

        def _made(self, start: int, stop: int) -> list[int]:
            assert 0 <= start < stop <= min(len(self), start + columns.MADE_AT_ONCE)
            return made[start:stop]

    assert list(Made()) == made and Made()[part] == made[part]
    if -len(made) <= at < len(made):
        assert Made()[at] == made[at]
    else:
        with pytest.raises(IndexError):
            Made()[at]
