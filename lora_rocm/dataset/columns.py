"""Sequences that build their elements on access. Storing a million objects instead would take ten times the memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

Thing = TypeVar("Thing")
MADE_AT_ONCE = 1024


class Lazy(Sequence[Thing]):
    """A sequence that builds its elements on access."""

    @abstractmethod
    def _made(self, start: int, stop: int) -> Sequence[Thing]:
        """Build the elements from index ``start`` up to, but not including, ``stop``.

        At most MADE_AT_ONCE elements are requested at a time, and all of them are within the sequence.
        """

    @overload
    def __getitem__(self, index: int) -> Thing: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Thing]: ...
    def __getitem__(self, index: int | slice) -> Thing | Sequence[Thing]:
        at = range(len(self))[index]
        if isinstance(at, int):
            return self._made(at, at + 1)[0]
        return list(self._between(at.start, at.stop)) if at.step == 1 else [self[each] for each in at]

    def __iter__(self) -> Iterator[Thing]:
        return self._between(0, len(self))

    def _between(self, start: int, stop: int) -> Iterator[Thing]:
        for first in range(start, stop, MADE_AT_ONCE):
            yield from self._made(first, min(first + MADE_AT_ONCE, stop))


class FirstN(Lazy[str]):
    """Collects names for a message: stores the first ``most`` names, and counts all of them.

    ``len`` returns the count of all names. Only the stored names can be read.
    """

    def __init__(self, most: int) -> None:
        self._most, self._names, self._count = most, list[str](), 0

    def append(self, name: str) -> None:
        self._count += 1
        if len(self._names) < self._most:
            self._names.append(name)

    def __len__(self) -> int:
        return self._count

    def _made(self, start: int, stop: int) -> Sequence[str]:
        return self._names[start:stop]
