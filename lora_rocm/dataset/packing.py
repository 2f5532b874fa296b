"""Puts short texts together into rows of nearly the same length. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

MARK = "\x1d"
"""First character of several texts in one string."""


def packed(texts: Sequence[str]) -> str:
    """Several texts as one string; one text is itself, unless it begins with ``MARK``."""
    if len(texts) == 1 and not texts[0].startswith(MARK):
        return texts[0]
    return MARK + json.dumps([*texts], ensure_ascii=False)


def unpacked(text: str) -> list[str]:
    """The texts in a string from ``packed``."""
    if not text.startswith(MARK):
        return [text]
    found: list[str] = json.loads(text[1:])
    return found


def rows_of(lengths: Sequence[int], longest: int) -> list[list[int]]:
    """Rows of texts, each at most ``longest`` long: indices of its texts.

    The longest text first, each goes into the fullest row that it fits into (best fit decreasing). A length above ``longest`` has a row of its own.
    """
    rows = list[list[int]]()
    with_room: dict[int, list[int]] = {}  # room -> numbers of the rows that have so much
    rooms = 0  # bit n is set if a row has room n
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, number = max(longest, length), len(rows)
            rows.append([])
        rows[number].append(index)
        with_room.setdefault(room - length, []).append(number)
        rooms |= 1 << (room - length)
    return rows
