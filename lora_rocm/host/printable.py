"""Texts from outside (names of devices, kernel log, variables) as a terminal can show them. Standard library only."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """``text`` with all escaped that would steer a terminal, end a line or cannot be encoded; ``keep`` stays."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )
