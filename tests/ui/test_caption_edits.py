"""Changes of the text of captions."""

from __future__ import annotations

import pytest

from lora_rocm.ui.image_set.caption_edits import CaptionEdit

CASES = [
    (CaptionEdit("replace", "Red", "blue"), "a red, RED sky", "a blue, blue sky"),
    (CaptionEdit("replace", "Red", "blue", match_case=True), "a red, Red sky", "a red, blue sky"),
    (CaptionEdit("replace", "cat", "dog", whole_words=True), "cat, cats, wildcat", "dog, cats, wildcat"),
    (CaptionEdit("replace", ".*", r"\1"), "a.*b", r"a\1b"),
    (CaptionEdit("append", "b, c"), "a, b", "a, b, c"),
    (CaptionEdit("prepend", "zwx"), "a,b", "zwx, a, b"),
    (CaptionEdit("prepend", "zwx"), "", "zwx"),
    (CaptionEdit("remove", "b, x"), "a, b, c", "a, c"),
    (CaptionEdit("first", "c, x"), "a, b, c", "c, a, b"),
    (CaptionEdit("last", "a"), "a, b", "b, a"),
    (CaptionEdit("tidy"), " a ,,b, a", "a, b"),
    (CaptionEdit("append", "z"), "a\nb\n", "a, z\nb, z\n"),
]


@pytest.mark.parametrize(("edit", "before", "after"), CASES, ids=range(len(CASES)))
def test_a_caption_is_changed(edit: CaptionEdit, before: str, after: str) -> None:
    assert edit.apply(before) == after
    if edit.kind != "replace":
        assert edit.apply(after) == after
