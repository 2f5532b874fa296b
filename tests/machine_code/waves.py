"""Waves that are at the same instruction: their registers, and which threads are on.

Registers are kept by number, so one instruction computes all waves at once. W waves of L threads (lanes):
vector registers uint32 [registers, W, L], scalar registers uint32 [128, W].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.machine_code.memory import Array, Buffers, Lds, Numbers, Words

Mask = npt.NDArray[np.bool_]
SCALARS = 128
VCC, TTMP, EXEC = 106, 108, 126
FULL = np.uint32(0xFFFFFFFF)


class Waves:
    """Some waves of a launch.

    number: of each wave in the launch. group: its workgroup. wave: its number in the workgroup.
    """

    def __init__(
        self,
        vector: Words,
        scalar: Words,
        scc: Mask,
        signalled: Mask,
        number: Numbers,
        waves_of_group: int,
        buffers: Buffers,
        lds: Lds,
    ) -> None:
        self.count, self.lanes = vector.shape[1:]
        self.vector, self.scalar = vector, scalar
        self.scc, self.signalled, self.number = scc, signalled, number
        self.waves_of_group, self.buffers, self.lds = waves_of_group, buffers, lds
        self.group, self.wave = number // waves_of_group, number % waves_of_group
        self._masks: dict[int, Mask] = {}
        self._all_on: bool | None = None

    def take(self, chosen: Mask) -> Waves:
        """A copy of some of the waves."""
        return Waves(
            self.vector[:, chosen],
            self.scalar[:, chosen],
            self.scc[chosen],
            self.signalled[chosen],
            self.number[chosen],
            self.waves_of_group,
            self.buffers,
            self.lds,
        )

    @staticmethod
    def join(parts: Sequence[Waves]) -> Waves:
        """All waves of some parts."""
        if len(parts) == 1:
            return parts[0]
        return Waves(
            np.concatenate([part.vector for part in parts], axis=1),
            np.concatenate([part.scalar for part in parts], axis=1),
            np.concatenate([part.scc for part in parts]),
            np.concatenate([part.signalled for part in parts]),
            np.concatenate([part.number for part in parts]),
            parts[0].waves_of_group,
            parts[0].buffers,
            parts[0].lds,
        )

    @property
    def on(self) -> Mask:
        """Threads that take part: bool [W, L]."""
        return self.mask(EXEC)

    @property
    def all_on(self) -> bool:
        if self._all_on is None:
            self._all_on = bool(self.on.all())
        return self._all_on

    def mask(self, register: int) -> Mask:
        """A scalar register, or two with 64 threads, as one bit per thread. Not to be changed."""
        found = self._masks.get(register)
        if found is None:
            words = self.scalar[register : register + self.lanes // 32]
            octets = np.ascontiguousarray(words.T).view(np.uint8)
            found = self._masks[register] = np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_)
        return found

    def write_mask(self, register: int, mask: Mask) -> None:
        words = np.packbits(mask, axis=1, bitorder="little").view(np.uint32)
        for part in range(self.lanes // 32):
            self.write_scalar(register + part, words[:, part])
        self._masks[register] = mask

    def write_scalar(self, register: int, words: Array | np.uint32) -> None:
        """Write one number per wave."""
        self._masks.pop(register, None)
        self._masks.pop(register - 1, None)
        if register >= EXEC:
            self._all_on = None
        self.scalar[register] = words

    def write_vector(self, register: int, words: Array, where: Mask | None = None) -> None:
        """Write to the threads that are on, of these to those in ``where``."""
        if not self.all_on:
            where = self.on if where is None else self.on & where
        if where is None:
            self.vector[register] = words
        else:
            np.copyto(self.vector[register], words, where=where)
