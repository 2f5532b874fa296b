"""Columns give back what was put into them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.dataset.columns import Few, Keys, Lazy, Texts

any_text = st.text(st.characters(codec=None), max_size=12)  # also halves of letters, as names of files may have
keys = st.integers(0, 99).map(lambda number: hashlib.sha256(bytes([number])).hexdigest()[:40])


@given(st.lists(any_text, max_size=12))
def test_texts(texts: list[str]) -> None:
    column = Texts(texts)
    assert list(column) == texts and len(column) == len(texts) and column[1:3] == texts[1:3]
    assert all(column[-1 - at] == texts[-1 - at] for at in range(len(texts)))
    with pytest.raises(IndexError):
        column[len(texts)]


@given(st.lists(st.lists(keys, max_size=3), max_size=6))
def test_keys(lists: list[list[str]]) -> None:
    column = Keys()
    for each in lists:
        column.append(each)
    assert [column[at] for at in range(len(column))] == [tuple(each) for each in lists]


@given(st.lists(any_text, max_size=9))
def test_few(names: list[str]) -> None:
    few = Few(3)
    for name in names:
        few.append(name)
    assert len(few) == len(names) and few[:3] == names[:3] and bool(few) == bool(names)


@given(st.lists(st.integers(), max_size=9), st.integers(-12, 12), st.slices(9))
def test_what_is_made_when_it_is_asked_for_is_asked_for_as_a_list(made: list[int], at: int, part: slice) -> None:
    class Made(Lazy[int]):
        def __len__(self) -> int:
            return len(made)

        def _made(self, index: int) -> int:
            assert index >= 0
            return made[index]

    assert list(Made()) == made and Made()[part] == made[part]
    if -len(made) <= at < len(made):
        assert Made()[at] == made[at]
    else:
        with pytest.raises(IndexError):
            Made()[at]
