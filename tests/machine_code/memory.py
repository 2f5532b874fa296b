"""Memory of a launch: the buffers that its kernel is given, and the LDS of its workgroups. Every access is checked.

Addresses of one instruction come together, one per thread that takes part. They are in bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.machine_code.errors import LdsRaceError, LdsUnwrittenError, MisalignedError, OutOfBoundsError

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]

FIRST_ADDRESS = 0x7E00_0000_0000
GAP = 4096  # bytes that belong to nobody between two buffers; no access is as long
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
NOBODY, SEVERAL = -1, -2
MOST_WAVES = 64  # of a workgroup


class Buffers:
    """Device memory: buffers with gaps between them."""

    def __init__(self, contents: list[npt.NDArray[np.uint8]]) -> None:
        starts = [GAP]
        for content in contents:
            starts.append(-(-(starts[-1] + len(content)) // 256) * 256 + GAP)
        self._starts = starts[:-1]
        self._sizes = [len(content) for content in contents]
        self._bytes = np.zeros(starts[-1], np.uint8)
        self._owned = np.zeros(starts[-1], np.bool_)
        for start, content in zip(self._starts, contents, strict=True):
            self._bytes[start : start + len(content)] = content
            self._owned[start : start + len(content)] = True

    def address(self, number: int) -> int:
        return FIRST_ADDRESS + self._starts[number]

    def content(self, number: int) -> npt.NDArray[np.uint8]:
        start = self._starts[number]
        return self._bytes[start : start + self._sizes[number]]

    def load(self, addresses: Numbers, size: int) -> Words:
        """[threads, words]; a size of 1 or 2 bytes fills the low bits of one word.

        Raises:
            OutOfBoundsError: a byte belongs to no buffer.
            MisalignedError: an address is not a multiple of the size, or of 4 bytes if it is larger.
        """
        first, units, memory = self._places(addresses, size)
        found: Words = memory[first[:, None] + np.arange(units)].astype(np.uint32, copy=False)
        return found

    def store(self, addresses: Numbers, size: int, words: Words) -> None:
        """As ``load``. Where threads write to the same place, one of them wins."""
        first, units, memory = self._places(addresses, size)
        memory[first[:, None] + np.arange(units)] = words  # of a narrow unit the low bits

    def add_64(self, addresses: Numbers, numbers: npt.NDArray[np.uint64]) -> None:
        """Add atomically."""
        self._check(addresses, 8, 8)
        np.add.at(self._bytes.view(np.uint64), (addresses - FIRST_ADDRESS) // 8, numbers)

    def _places(self, addresses: Numbers, size: int) -> tuple[Numbers, int, Array]:
        unit = min(size, 4)
        self._check(addresses, size, unit)
        return (addresses - FIRST_ADDRESS) // unit, size // unit, self._bytes.view(UNITS[unit])

    def _check(self, addresses: Numbers, size: int, unit: int) -> None:
        if not addresses.size:
            return
        index = addresses - FIRST_ADDRESS
        if index.min() < 0 or index.max() + size > len(self._bytes):
            outside = (index < 0) | (index + size > len(self._bytes))
        else:
            outside = ~(self._owned[index] & self._owned[index + size - 1])
        if outside.any():
            raise OutOfBoundsError(f"{size} bytes {self._where(int(index[outside][0]))} are outside every buffer")
        if (index % unit).any():
            raise MisalignedError(f"{size} bytes at an address that is no multiple of {unit}")

    def _where(self, index: int) -> str:
        """The place of a byte, by the nearest buffer."""
        ends = [max(start - index, index - start - size) for start, size in zip(self._starts, self._sizes, strict=True)]
        if not ends:
            return f"at {index + FIRST_ADDRESS:#x}"
        nearest = int(np.argmin(ends))
        return f"at {index - self._starts[nearest]} of buffer {nearest}, which has {self._sizes[nearest]},"


class Lds:
    """The LDS of all workgroups, in halves of words, and who touched them since the last barrier."""

    def __init__(self, groups: int, size: int) -> None:
        halves = -(-size // 4) * 2
        self._size = size
        self._halves = np.zeros((groups, halves), np.uint16)
        self._written = np.zeros((groups, halves), np.bool_)
        self._writer = np.full((groups, halves), NOBODY, np.int32)
        self._reader = np.full((groups, halves), NOBODY, np.int32)

    def barrier(self, groups: Numbers) -> None:
        """Forget who touched the LDS of some workgroups."""
        self._writer[groups] = NOBODY
        self._reader[groups] = NOBODY

    def load(self, groups: Numbers, waves: Numbers, addresses: Numbers, size: int) -> Halves:
        """[threads, halves].

        Raises:
            OutOfBoundsError: an address beyond the workgroup's LDS.
            MisalignedError: an address that is not a multiple of the size.
            LdsUnwrittenError: a half that was never written.
            LdsRaceError: a half that another wave wrote since the last barrier.
        """
        at = self._halves_at(groups, addresses, size)
        wave = np.broadcast_to(waves[:, None], at[1].shape)
        if not self._written[at].all():
            raise LdsUnwrittenError(
                f"byte {int(addresses[~self._written[at].all(1)][0])} of LDS is read before written"
            )
        writer = self._writer[at]
        if ((writer != NOBODY) & (writer != wave)).any():
            raise LdsRaceError("LDS is read that another wave wrote, without a barrier between")
        reader = self._reader[at]
        self._reader[at] = np.where((reader == NOBODY) | (reader == wave), wave, SEVERAL)
        alone = self._reader[at] == wave
        self._reader[at[0][~alone], at[1][~alone]] = SEVERAL
        return self._halves[at]

    def store(self, groups: Numbers, waves: Numbers, addresses: Numbers, halves: Halves) -> None:
        """As ``load``. Several waves may write equal halves. Of the threads of a wave the last one wins.

        Raises:
            LdsRaceError: a half that another wave read, or wrote otherwise, since the last barrier.
        """
        places = (groups * self._size + addresses) * MOST_WAVES + waves
        last = len(places) - 1 - np.unique(places[::-1], return_index=True)[1]
        groups, waves, addresses, halves = groups[last], waves[last], addresses[last], halves[last]
        at = self._halves_at(groups, addresses, 2 * halves.shape[1])
        wave = np.broadcast_to(waves[:, None], at[1].shape)
        writer, reader = self._writer[at], self._reader[at]
        of_others = (writer != NOBODY) & (writer != wave)
        if (of_others & (self._halves[at] != halves)).any():
            raise LdsRaceError("LDS is written that another wave wrote, without a barrier between")
        if ((reader != NOBODY) & (reader != wave)).any():
            raise LdsRaceError("LDS is written that another wave read, without a barrier between")
        self._halves[at], self._writer[at], self._written[at] = halves, wave, True
        alone = (self._writer[at] == wave) & ~of_others
        if (self._halves[at] != halves).any():
            raise LdsRaceError("two waves write different numbers to the same place of LDS at once")
        self._writer[at[0][~alone], at[1][~alone]] = SEVERAL

    def _halves_at(self, groups: Numbers, addresses: Numbers, size: int) -> tuple[Numbers, Numbers]:
        if addresses.size and (addresses.min() < 0 or addresses.max() + size > self._size):
            raise OutOfBoundsError(f"byte {int(addresses.max())} of LDS: the workgroup has {self._size}")
        if (addresses % size).any():
            raise MisalignedError(f"{size} bytes of LDS at an address that is no multiple of {size}")
        index = addresses[:, None] // 2 + np.arange(size // 2)
        return np.broadcast_to(groups[:, None], index.shape), index
