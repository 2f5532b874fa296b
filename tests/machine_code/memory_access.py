"""Loads, stores and atomic additions: of device memory by descriptor or address, and of LDS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.errors import BarrierError
from tests.machine_code.memory import Numbers, Words
from tests.machine_code.operands import (
    Builder,
    Operation,
    Reader,
    read_scalar,
    read_words,
    register_of,
    scalar_register,
    vector_register,
)  # fmt: skip
from tests.machine_code.waves import Mask, Waves

CACHE_HINTS = {"glc", "slc", "dlc", "nt", "sc1", "scope", "th"}
STRIDE = np.uint32(0x3FFF0000)


@dataclass(frozen=True)
class Width:
    """Bytes of an access, and whether a load fills the register with the sign."""

    size: int
    signed: bool = False

    @property
    def registers(self) -> int:
        return max(self.size // 4, 1)


Where = Callable[[Waves], tuple[Numbers, Mask]]
"""Address of each thread, and the threads that access memory, both [waves, threads]."""


def _offset(instruction: Instruction, key: str = "offset") -> int:
    return int(instruction.modifiers.get(key, "0"), 0)


def _by_descriptor(instruction: Instruction) -> Where:
    """Base and size of a buffer are in four scalar registers; beyond the size nothing is read or written."""
    if set(instruction.modifiers) - {"offset", "offen"} - CACHE_HINTS:
        raise instruction.unknown("modifier")
    _, index, descriptor, base = instruction.operands
    first = scalar_register(instruction, descriptor)
    offset = read_words(instruction, index) if "offen" in instruction.modifiers else None
    more, start = _offset(instruction), read_scalar(instruction, base)

    def where(waves: Waves) -> tuple[Numbers, Mask]:
        low, high, size, _ = waves.scalar[first : first + 4].astype(np.int64)
        if (waves.scalar[first + 1] & STRIDE).any():
            raise instruction.unknown("descriptor with a stride")
        own = np.zeros((1, 1), np.int64) if offset is None else offset(waves).astype(np.int64)
        inside = np.broadcast_to(own + more < size[:, None], (waves.count, waves.lanes))
        address = (low | (high & 0xFFFF) << 32)[:, None] + start(waves).astype(np.int64)[:, None] + own + more
        return np.broadcast_to(address, inside.shape), inside & waves.on

    return where


def _by_address(instruction: Instruction, own: str, base: str) -> Where:
    """A 64-bit address of each thread, or a scalar one plus 32 bits of each thread."""
    if set(instruction.modifiers) - {"offset"} - CACHE_HINTS:
        raise instruction.unknown("modifier")
    number, more = vector_register(instruction, own), _offset(instruction)
    scalar = None if base == "off" else read_scalar(instruction, base, "u64")

    def where(waves: Waves) -> tuple[Numbers, Mask]:
        address = waves.vector[number].astype(np.int64) + more
        if scalar is None:
            return address + (waves.vector[number + 1].astype(np.int64) << 32), waves.on
        return address + scalar(waves).astype(np.int64)[:, None], waves.on

    return where


def device_memory(space: Literal["buffer", "global"], stores: bool, width: Width) -> Builder:
    """A load or store of device memory."""

    def build(instruction: Instruction, target: Target) -> Operation:
        operands = instruction.operands
        if len(operands) != (4 if space == "buffer" else 3):
            raise instruction.unknown("form")
        if space == "buffer":
            data, where = operands[0], _by_descriptor(instruction)
        else:
            own, data = operands[:2] if stores else (operands[1], operands[0])
            where = _by_address(instruction, own, operands[2])
        return _store(instruction, data, where, width) if stores else _load(instruction, data, where, width)

    return build


def _load(instruction: Instruction, into: str, where: Where, width: Width) -> Operation:
    first = vector_register(instruction, into)

    def run(waves: Waves) -> None:
        address, mask = where(waves)
        words = waves.buffers.load(address[mask], width.size)
        if width.signed:
            words = words.astype(np.int8 if width.size == 1 else np.int16).astype(np.int32).view(np.uint32)
        for part in range(width.registers):
            found = np.zeros((waves.count, waves.lanes), np.uint32)
            found[mask] = words[:, part]
            waves.write_vector(first + part, found)

    return run


def _store(instruction: Instruction, data: str, where: Where, width: Width) -> Operation:
    words = _words(instruction, data, width.registers)

    def run(waves: Waves) -> None:
        address, mask = where(waves)
        waves.buffers.store(address[mask], width.size, words(waves)[mask])

    return run


def _words(instruction: Instruction, text: str, registers: int) -> Callable[[Waves], Words]:
    """Registers that follow each other: [waves, threads, registers]."""
    register = register_of(text)
    if register is None or register.kind != "v" or (register.half and registers > 1):
        raise instruction.unknown(f"operand {text!r}")
    if register.half:
        half = read_words(instruction, text)
        return lambda waves: half(waves)[..., None]
    numbers = slice(register.number, register.number + registers)
    return lambda waves: np.moveaxis(waves.vector[numbers], 0, -1)


def added_64(instruction: Instruction, target: Target) -> Operation:
    """An atomic addition of 64 bits to memory, which returns nothing."""
    own, data, base = instruction.operands
    where, first = _by_address(instruction, own, base), vector_register(instruction, data)

    def run(waves: Waves) -> None:
        address, mask = where(waves)
        low, high = (waves.vector[first + part].astype(np.uint64) for part in (0, 1))
        waves.buffers.add_64(address[mask], (low | high << np.uint64(32))[mask])

    return run


def lds(stores: bool, size: int, accesses: int, unit: int) -> Builder:
    """One or two loads or stores of LDS. ``unit``: the unit of an offset, in bytes."""
    keys = ("offset",) if accesses == 1 else ("offset0", "offset1")

    def build(instruction: Instruction, target: Target) -> Operation:
        if set(instruction.modifiers) - set(keys):
            raise instruction.unknown("modifier")
        offsets = [_offset(instruction, key) * unit for key in keys]
        if stores:
            address = read_words(instruction, instruction.operands[0])
            data = [_words(instruction, text, max(size // 4, 1)) for text in instruction.operands[1:]]
            return _checked(lambda waves: _lds_store(waves, address, offsets, data, size))
        address = read_words(instruction, instruction.operands[1])
        first = vector_register(instruction, instruction.operands[0])
        return _checked(lambda waves: _lds_load(waves, address, offsets, size, first))

    return build


def _checked(run: Operation) -> Operation:
    def checked(waves: Waves) -> None:
        if waves.signalled.any():
            raise BarrierError("a wave touches LDS between the two halves of a barrier")
        run(waves)

    return checked


def _threads(waves: Waves, address: Reader, offset: int) -> tuple[Numbers, Numbers, Numbers]:
    """(workgroup, wave, address) of each thread that is on."""
    at = np.broadcast_to(address(waves).astype(np.int64) + offset, (waves.count, waves.lanes))
    which = np.nonzero(waves.on)[0]
    return waves.group[which], waves.wave[which], at[waves.on]


def _lds_store(
    waves: Waves, address: Reader, offsets: list[int], data: list[Callable[[Waves], Words]], size: int
) -> None:
    for offset, words in zip(offsets, data, strict=True):
        halves = np.ascontiguousarray(words(waves)[waves.on]).view(np.uint16)
        waves.lds.store(*_threads(waves, address, offset), halves[:, : size // 2])  # of a narrow one the low bits


def _lds_load(waves: Waves, address: Reader, offsets: list[int], size: int, first: int) -> None:
    loaded = [waves.lds.load(*_threads(waves, address, offset), size) for offset in offsets]
    halves = np.concatenate(loaded, axis=1)
    words_N = np.ascontiguousarray(halves).view(np.uint32) if size > 2 else halves.astype(np.uint32)
    for part, words in enumerate(words_N.T):
        found = np.zeros((waves.count, waves.lanes), np.uint32)
        found[waves.on] = words
        waves.write_vector(first + part, found)


def _table() -> dict[str, Builder]:
    found: dict[str, Builder] = {"global_atomic_add_u64": added_64}
    wide = {f"b{32 * words}": Width(4 * words) for words in (1, 2, 3, 4)}
    loads = {**wide, "u16": Width(2), "i16": Width(2, signed=True), "u8": Width(1), "i8": Width(1, signed=True)}
    spaces: tuple[Literal["buffer", "global"], ...] = ("buffer", "global")
    for space in spaces:
        found |= {f"{space}_load_{name}": device_memory(space, False, width) for name, width in loads.items()}
        stored = {**wide, "b16": Width(2), "b8": Width(1)}
        found |= {f"{space}_store_{name}": device_memory(space, True, width) for name, width in stored.items()}
    found |= {"ds_load_u16": lds(False, 2, 1, 1), "ds_store_b16": lds(True, 2, 1, 1)}
    for stores, verb in ((False, "load"), (True, "store")):
        for name, width in wide.items():
            found[f"ds_{verb}_{name}"] = lds(stores, width.size, 1, 1)
            found[f"ds_{verb}_2addr_{name}"] = lds(stores, width.size, 2, width.size)
            found[f"ds_{verb}_2addr_stride64_{name}"] = lds(stores, width.size, 2, 64 * width.size)
    return found


INSTRUCTIONS = _table()
