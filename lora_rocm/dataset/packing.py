"""Puts short texts together into rows of nearly the same length. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def rows_of(lengths: Sequence[int], longest: int) -> list[list[int]]:
    """Rows of texts, each at most ``longest`` long: indices of its texts.

    The longest text first, each goes into the fullest row that it fits into (best fit decreasing). A length above
    ``longest`` has a row of its own.
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
