"""Text that may come from outside, and the text that a terminal gets."""

from __future__ import annotations

import pytest

from lora_rocm.foundation.terminal_text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Radeon RX 7900 XTX [red] M\u00fcller", "Radeon RX 7900 XTX [red] M\u00fcller"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("one\r\ntwo", r"one\r\ntwo"),
        ("\x9b2J\u202e\u2028", r"\x9b2J\u202e\u2028"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_would_steer_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_to_stay_stays() -> None:
    assert printable("a\nb\t", keep="\n") == "a\nb\\t"
