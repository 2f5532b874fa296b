"""Texts from outside (names of devices, kernel log, variables) as a terminal can show them. Standard library only."""

from __future__ import annotations

import unicodedata

STEERING = frozenset(("Cc", "Cs", "Zl", "Zp"))  # controls, lone surrogates, ends of lines
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # they reorder what stands beside them


def printable(text: str, keep: str = "") -> str:
    """``text`` with all escaped that would steer a terminal, end a line or cannot be encoded; ``keep`` stays."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def legible(text: str, keep: str = "") -> str:
    """``text`` as a name in sentences and files: what steers, breaks the line or turns the writing is escaped.

    ``keep`` stays. Unlike ``printable`` it leaves letters that are not seen but belong to others (joiners of emoji).
    """
    return "".join(
        letter.encode("unicode_escape").decode("ascii") if _steers(letter) and letter not in keep else letter
        for letter in text
    )


def one_line(text: str) -> str:
    """``text`` on one line, each run of white space or control letters a single space."""
    return " ".join("".join(" " if _steers(letter) else letter for letter in text).split())


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) in STEERING or letter in TURNING
