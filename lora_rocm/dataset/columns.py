"""Many texts and numbers in little memory: a Python object each would take ten times as much."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

Thing = TypeVar("Thing")
KEY_BYTES = 20
"""Of a cache key, which is 40 hex digits."""


def all_below(numbers: Sequence[int], limit: int) -> bool:
    """Whether each is an index into something of so many."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < limit)


class Lazy(Sequence[Thing]):
    """A sequence whose things are made when they are asked for, by ``_made`` from an index that is not negative."""

    @abstractmethod
    def _made(self, index: int) -> Thing: ...

    @overload
    def __getitem__(self, index: int) -> Thing: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Thing]: ...
    def __getitem__(self, index: int | slice) -> Thing | Sequence[Thing]:
        at = range(len(self))[index]
        return self._made(at) if isinstance(at, int) else [self._made(each) for each in at]

    def __iter__(self) -> Iterator[Thing]:
        return map(self._made, range(len(self)))  # these indices need no look at each


class Column:
    """Bytes of many things one behind the other, and where each of them ends."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def is_whole(self, unit: int = 1) -> bool:
        """Whether the ends fit the bytes, where a thing has a multiple of ``unit``: for columns from a file."""
        import numpy as np

        ends_N = np.array(self._ends)
        fits = len(ends_N) > 0 and ends_N[0] == 0 and ends_N[-1] == len(self._bytes)
        return bool(fits and (ends_N[1:] >= ends_N[:-1]).all() and (ends_N % unit == 0).all())


class Texts(Column, Lazy[str]):
    """Texts one behind the other, in UTF-8 (also what is no letter: names of files may be anything)."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        super().__init__()
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        self._bytes += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._bytes))

    def _made(self, index: int) -> str:
        return self._bytes[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogatepass")


class Keys(Column):
    """Lists of cache keys, one list for each of many things, in the order in which they are appended."""

    def append(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._bytes += bytes.fromhex(key)
        self._ends.append(len(self._bytes))

    @property
    def raw(self) -> bytearray:
        """All of them, KEY_BYTES each."""
        return self._bytes

    def __getitem__(self, index: int) -> tuple[str, ...]:
        start, end = self._ends[index], self._ends[index + 1]
        return tuple(self._bytes[at : at + KEY_BYTES].hex() for at in range(start, end, KEY_BYTES))


class Few(Lazy[str]):
    """The first names of many, and how many there are: for sentences. Only the first can be asked for."""

    def __init__(self, most: int) -> None:
        self._most, self._names, self._count = most, list[str](), 0

    def append(self, name: str) -> None:
        self._count += 1
        if len(self._names) < self._most:
            self._names.append(name)

    def __len__(self) -> int:
        return self._count

    def _made(self, index: int) -> str:
        return self._names[index]
