"""Finds special tokens in texts, and breaks those that data contain as plain text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BREAKS = "\ue0f1\ue0f2\ue0f3\ue0f4"
"""Private-use characters. One of them is inserted into each special token that data contain as text, so that the
tokenizer does not recognise the token.
"""
MANY_LETTERS = 16
Span = tuple[int, int]


class SpecialTokens:
    """Searches texts for a tokenizer's special tokens.

    There may be hundreds of thousands of special tokens, so they are looked up in a set.

    Args:
        texts: the texts of the special tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(filter(None, texts))
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        self._sorted = sorted(self._texts)
        self._all_lengths = tuple(sorted({len(text) for text in self._texts}, reverse=True))

    def spans(self, text: str, letter: str = "") -> Iterator[Span]:
        """Yield the spans of special tokens from left to right. If several begin at one position, the longest counts.

        ``letter``: the character that breaks tokens (see ``broken``). A one-character token followed by it does not
        count.
        """
        at = 0
        for place in self._places(text):
            if place < at:
                continue
            for length in self._lengths[text[place]]:
                if text[place : place + length] in self._texts:
                    if length == 1 and letter and text.startswith(letter, place + 1):
                        continue
                    yield place, place + length
                    at = place + length
                    break

    def _places(self, text: str) -> list[int]:
        """Return the positions at which a special token may begin."""
        if len(self._lengths) > MANY_LETTERS:
            return [place for place, letter in enumerate(text) if letter in self._lengths]
        found = []
        for letter in self._lengths:
            place = text.find(letter)
            while place >= 0:
                found.append(place)
                place = text.find(letter, place + 1)
        return sorted(found)

    def count(self, text: str, letter: str) -> int:
        return sum(1 for _ in self.spans(text, letter))

    def is_begun(self, text: str) -> bool:
        """Whether a text ends in the middle of a special token, so that the next text may complete it."""
        end = text[1 - max(self._all_lengths, default=1) :] if self._all_lengths[:1] > (1,) else ""
        for place in self._places(end):
            at = bisect_right(self._sorted, end[place:])
            if at < len(self._sorted) and self._sorted[at].startswith(end[place:]):
                return True
        return False

    def is_in(self, text: str) -> bool:
        return next(self.spans(text), None) is not None

    def broken(self, text: str, letter: str) -> str:
        """Return a text with ``letter`` inserted after the first character of each special token."""
        pieces, at = [], 0
        for start, end in self.spans(text):
            pieces += [text[at : start + 1], letter, text[start + 1 : end]]
            at = end
        return "".join([*pieces, text[at:]])

    def at_end(self, text: str) -> str | None:
        """Return the longest special token at the end of a text, or None if it does not end with one."""
        return next((text[-n:] for n in self._all_lengths if text[-n:] in self._texts), None)


def leaves(value: Any) -> Iterator[str]:
    """Yield every text inside a nested value, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(key)
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)


def changed_inside(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a nested value in which ``change`` has been applied to every text."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {changed_inside(key, change): changed_inside(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [changed_inside(each, change) for each in value]
    return value
