"""Injected copy faults: their effects on bytes, and a bus that makes one in each batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rocm.device.transfer import copy_to_device

TARGETS = ("data", "expected", "both")
"""Target of a fault: a tensor of the batch, the fingerprints sent with it, or both in the same way."""


@dataclass(frozen=True)
class Scene:
    """Data that a fault can use.

    Attributes:
        before: earlier bytes at the destination, as many as the tensor has.
        other: bytes of another tensor, as many.
        item: bytes of an element. row: bytes of a row, along the last dimension.
        samples: B. pair: two of them, equal if there is only one.
        turn: number of the fault, which selects the bit position.
    """

    before: Tensor
    other: Tensor
    item: int
    row: int
    samples: int
    pair: tuple[int, int]
    turn: int
    rng: random.Random


def _elements(raw: Tensor, scene: Scene) -> int:
    return raw.numel() // scene.item


def all_zeros(raw: Tensor, scene: Scene) -> Tensor:
    """Nothing arrives: all bytes are zero."""
    return torch.zeros_like(raw)


def zero_tail(raw: Tensor, scene: Scene) -> Tensor:
    """The copy ends early, in memory that was zero."""
    raw[scene.rng.randrange(raw.numel()) :] = 0
    return raw


def zero_block(raw: Tensor, scene: Scene) -> Tensor:
    """A quarter of the bytes, at a random position, is zero."""
    begin = scene.rng.randrange(raw.numel())
    raw[begin : begin + max(scene.item, raw.numel() // 4)] = 0
    return raw


def stale(raw: Tensor, scene: Scene) -> Tensor:
    """The copy does not happen: the destination keeps its earlier bytes."""
    return scene.before


def half_written(raw: Tensor, scene: Scene) -> Tensor:
    """The copy ends in the middle: the rest of the destination keeps its earlier bytes."""
    half = raw.numel() // 2
    raw[half:] = scene.before[half:]
    return raw


def shifted_rows(raw: Tensor, scene: Scene) -> Tensor:
    """All bytes arrive one row further."""
    return raw.roll(scene.row if scene.row < raw.numel() else scene.item)


def swapped_samples(raw: Tensor, scene: Scene) -> Tensor:
    """Two samples of the batch are swapped."""
    rows_BN = raw.view(scene.samples, -1)
    one, two = scene.pair
    rows_BN[[one, two]] = rows_BN[[two, one]]
    return raw


def swapped_tensors(raw: Tensor, scene: Scene) -> Tensor:
    """Another tensor of the send arrives instead of this one."""
    return scene.other


def one_bit(raw: Tensor, scene: Scene) -> Tensor:
    """A single bit is flipped; faults cycle through the bit positions of an element."""
    bit = scene.turn % (8 * scene.item)
    raw[scene.rng.randrange(_elements(raw, scene)) * scene.item + bit // 8] ^= 1 << bit % 8
    return raw


def one_nan(raw: Tensor, scene: Scene) -> Tensor:
    """All bits of an element are set: NaN in every float format, -1 in an integer."""
    begin = scene.rng.randrange(_elements(raw, scene)) * scene.item
    raw[begin : begin + scene.item] = 0xFF
    return raw


def byte_swapped(raw: Tensor, scene: Scene) -> Tensor:
    """The bytes of each element are reversed."""
    width = max(2, scene.item)
    whole = raw.numel() // width * width
    raw[:whole] = raw[:whole].view(-1, width).flip(1).reshape(-1)
    return raw


def duplicated_tile(raw: Tensor, scene: Scene) -> Tensor:
    """A tile is duplicated over another place."""
    size = max(1, _elements(raw, scene) // 8) * scene.item
    places = range(0, raw.numel() - size + 1, scene.item)
    source, target = scene.rng.choice(places), scene.rng.choice(places)
    raw[target : target + size] = raw[source : source + size].clone()
    return raw


KINDS: dict[str, Callable[[Tensor, Scene], Tensor]] = {
    kind.__name__: kind
    for kind in (
        all_zeros,
        zero_tail,
        zero_block,
        stale,
        half_written,
        shifted_rows,
        swapped_samples,
        swapped_tensors,
        one_bit,
        one_nan,
        byte_swapped,
        duplicated_tile,
    )
}


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a copy of a CPU tensor's bytes: uint8 [N]."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def fitted(raw: Tensor, size: int) -> Tensor:
    """Return exactly ``size`` bytes, by cutting or repeating."""
    return raw.repeat(-(-size // raw.numel()))[:size].clone()


def spoil(tensor: Tensor, kind: str, scene: Scene) -> Tensor:
    """Return a changed copy of a CPU tensor (an equal one if the fault changes nothing)."""
    return KINDS[kind](bytes_of(tensor), scene).view(tensor.dtype).view(tensor.shape)


@dataclass
class Fault:
    """One fault of a kind on ``target``; it spoils tensor ``first`` of a send (and ``second``, if it needs two)."""

    turn: int  # number among the faults of its kind
    kind: str
    target: str
    first: int
    second: int
    pair: tuple[int, int]
    rng: random.Random
    changed: bool = False  # whether any received byte differs from the sent one

    @classmethod
    def drawn(
        cls,
        number: int,
        seed: int,
        tensors: Mapping[str, Tensor],
        kinds: Sequence[str] = tuple(KINDS),
        targets: Sequence[str] = TARGETS,
    ) -> Fault:
        """Draw a fault, as a function of the two numbers, the shapes, and the choices."""
        rng = random.Random(f"{seed} {number}")
        values = list(tensors.values())
        kind, target = kinds[number % len(kinds)], rng.choice(targets)
        first = rng.randrange(len(values))
        alike = [k for k, value in enumerate(values) if k != first and value.nbytes == values[first].nbytes]
        others = alike or [k for k in range(len(values)) if k != first]
        samples = len(values[0])
        one = rng.randrange(samples)
        two = rng.choice([row for row in range(samples) if row != one] or [one])
        return cls(number // len(kinds), kind, target, first, rng.choice(others), (one, two), rng)

    def scene(self, tensor: Tensor, before: Tensor, other: Tensor, pair: tuple[int, int]) -> Scene:
        item, size = tensor.element_size(), tensor.nbytes
        row = tensor.shape[-1] * item
        return Scene(fitted(before, size), fitted(other, size), item, row, len(tensor), pair, self.turn, self.rng)


class FaultyBus:
    """A copy function for ``DeviceTransfer`` that injects ``fault`` into a send; call ``begin`` before each send."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._copied = 0
        self._memory: dict[str, Tensor] = {}  # earlier bytes at each destination

    def begin(self, tensors: Mapping[str, Tensor], fault: Fault | None) -> None:
        """Announce the next copies: these tensors, in order, and then their expected fingerprints."""
        self._names, self._tensors, self._copied, self.fault = list(tensors), list(tensors.values()), 0, fault

    def __call__(self, tensor: Tensor, device: torch.device, method: str) -> Tensor:
        return copy_to_device(self.spoilt(tensor), device, method)

    def spoilt(self, tensor: Tensor) -> Tensor:
        """Return the bytes that arrive instead of the next tensor of the send."""
        place = self._copied
        self._copied += 1
        is_data = place < len(self._tensors)
        name = self._names[place] if is_data else "expected"
        before = self._memory.get(name, torch.zeros(1, dtype=torch.uint8))
        self._memory[name] = bytes_of(tensor)
        fault = self.fault
        if fault is None:
            return tensor
        arrives = self._data(tensor, place, before) if is_data else self._expected(tensor, before)
        fault.changed |= not torch.equal(bytes_of(arrives), bytes_of(tensor))
        return arrives

    def _data(self, tensor: Tensor, place: int, before: Tensor) -> Tensor:
        fault = self.fault
        assert fault is not None
        hit = (fault.first, fault.second) if fault.kind == "swapped_tensors" else (fault.first,)
        if fault.target == "expected" or place not in hit:
            return tensor
        other = self._tensors[fault.second if place == fault.first else fault.first]
        return spoil(tensor, fault.kind, fault.scene(tensor, before, bytes_of(other), fault.pair))

    def _expected(self, expected_KB: Tensor, before: Tensor) -> Tensor:
        """Spoil the fingerprints. Swaps match the data's swaps, which is the hardest case to detect."""
        fault = self.fault
        assert fault is not None
        if fault.target == "data":
            return expected_KB
        if fault.kind == "swapped_tensors":
            changed_KB, rows = expected_KB.clone(), [fault.first, fault.second]
            changed_KB[rows] = expected_KB[rows[::-1]]
            return changed_KB
        if fault.kind == "swapped_samples":
            changed_KB, columns = expected_KB.clone(), list(fault.pair)
            changed_KB[fault.first, columns] = expected_KB[fault.first, columns[::-1]]
            return changed_KB
        return spoil(expected_KB, fault.kind, fault.scene(expected_KB, before, before, (0, len(expected_KB) - 1)))
