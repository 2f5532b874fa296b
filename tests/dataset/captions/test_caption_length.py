"""Captions that are longer than the text encoders read. CLIP's own tokenizer is compared in tests/families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_rocm.dataset.captions.caption_length import (
    AT_ONCE,
    KEPT_IN,
    cut_notice,
    keep_limits,
    lost_ends,
    recall_limits,
)
from tests.fake_encoders import letter_limit
from tests.wording import says, worded


def test_the_longest_lost_end_is_told() -> None:
    limits = [letter_limit(20), letter_limit(10)]
    assert list(lost_ends(["", "short", "0123456789", "0123456789ab", "ü" * 6], limits)) == ["", "", "", "9ab", "üü"]
    assert list(lost_ends(["long " * 100], [])) == [""]


def test_many_captions_are_counted_and_the_first_is_named() -> None:
    captions = [(f"{number}.png", "0123456789" + "x" * (number % 2)) for number in range(2 * AT_ONCE + 10)]
    assert cut_notice(captions, [letter_limit(10)]) == (
        worded("dataset/value-captions-are-longer-than-the-text", value=AT_ONCE + 5),
    )
    assert cut_notice(captions, [letter_limit(11)]) == ()
    (long,) = cut_notice([("a", "y" * 5000)], [letter_limit(11)])
    assert says(long, "dataset/1-caption-is") and "y' ..." in long and len(long) < 200


def test_tokenizers_are_kept_once_and_recalled(tmp_path: Path) -> None:
    limits = [letter_limit(77), letter_limit(12)]
    kept = keep_limits(tmp_path, limits)
    assert recall_limits(tmp_path, kept) == limits
    (file,) = (tmp_path / KEPT_IN).iterdir()
    file.write_bytes(file.read_bytes().replace(b"BPE", b"XPE"))
    assert recall_limits(tmp_path, kept) is None, "it is not what was kept"
    assert keep_limits(tmp_path, limits) == kept and recall_limits(tmp_path, kept) == limits
    file.unlink()
    assert recall_limits(tmp_path, kept) is None


@pytest.mark.parametrize("kept", [None, 7, "x", [["a"]], [[1, "x"]], [["../../etc/passwd", 7]], {}])
def test_what_was_not_kept_is_not_recalled(tmp_path: Path, kept: Any) -> None:
    assert not recall_limits(tmp_path, kept)
