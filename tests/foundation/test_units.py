"""Numbers for people."""

import pytest

from lora_rocm.foundation.units import count_text, number_text, rate_text, size_text, time_text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (size_text(0), "0 B"),
        (size_text(1023), "1023 B"),
        (size_text(1536), "1.5 KiB"),
        (size_text(5 * 2**30), "5.0 GiB"),
        (size_text(3 * 2**50), "3072.0 TiB"),
        (time_text(0.4), "0:00"),
        (time_text(65), "1:05"),
        (time_text(3725), "1:02:05"),
        (time_text(-3), "0:00"),
        (rate_text(4), "4.00 it/s"),
        (rate_text(0.25), "4.00 s/it"),
        (rate_text(0), "-"),
        (number_text(0.123456), "0.1235"),
        (number_text(None), "-"),
        (count_text(1, "step"), "1 step"),
        (count_text(0, "step"), "0 steps"),
        (count_text(1, "entry", "entries"), "1 entry"),
        (count_text(2, "entry", "entries"), "2 entries"),
    ],
)
def test_words(found: str, text: str) -> None:
    assert found == text
