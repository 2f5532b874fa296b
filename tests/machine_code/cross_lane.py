"""Instructions in which threads read each other's registers: data parallel primitives, permutes, swizzles."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.memory import Array
from tests.machine_code.operands import (
    Builder,
    Operation,
    Reader,
    read_scalar,
    read_words,
    vector_register,
    write_scalar,
)  # fmt: skip
from tests.machine_code.waves import Mask, Waves

Indices = npt.NDArray[np.int64]
ROW = 16  # threads of a row
SHARED = {"row_mask", "bank_mask", "bound_ctrl", "fi"}
SWAPS = re.compile(r"swizzle\((SWAP|REVERSE),(\d+)\)")


@dataclass(frozen=True)
class LaneMove:
    """The thread that each thread reads from, according to an instruction's modifiers.

    inside: the threads with an existing source. allowed: the threads that may be written. zeroed: where there is no
    source, 0 is read; else nothing is written. all_sources: threads that are off are read as well.
    """

    source: Indices
    inside: Mask
    allowed: Mask
    zeroed: bool
    all_sources: bool

    def valid(self, waves: Waves) -> Mask:
        if self.all_sources or waves.all_on:
            return self.inside[None, :]
        valid: Mask = self.inside & waves.on[:, self.source]
        return valid

    def moved(self, words: Reader) -> Reader:
        """The values that each thread reads."""

        def read(waves: Waves) -> Array:
            found = np.broadcast_to(words(waves), (waves.count, waves.lanes))
            return np.where(self.valid(waves), found[:, self.source], np.uint32(0))

        return read

    def written(self, waves: Waves) -> Mask:
        """The threads that may be written."""
        mask: Mask = self.allowed[None, :] if self.zeroed else self.allowed & self.valid(waves)
        return mask


def lane_move(instruction: Instruction, target: Target) -> LaneMove:
    """Read the modifiers of data parallel primitives.

    Raises:
        UnknownInstructionError: the modifiers are not one known pattern.
    """
    modifiers = instruction.modifiers
    patterns = set(modifiers) - SHARED
    if len(patterns) != 1:
        raise instruction.unknown("pattern")
    (name,) = patterns
    lane = np.arange(target.lanes, dtype=np.int64)
    found = _pattern(name, modifiers[name], lane)
    if found is None:
        raise instruction.unknown("pattern")
    source, inside = found
    rows, banks = (int(modifiers.get(key, "0xf"), 0) for key in ("row_mask", "bank_mask"))
    allowed = ((rows >> (lane // ROW)) & (banks >> (lane % ROW // 4)) & 1).astype(np.bool_)
    zeroed, off = (modifiers.get(key, "0") not in ("0", "false") for key in ("bound_ctrl", "fi"))
    return LaneMove(np.where(inside, source, 0), inside, allowed, zeroed, off)


def _pattern(name: str, value: str, lane: Indices) -> tuple[Indices, Mask] | None:
    """(source of each thread, whether it exists)."""
    row, place = lane - lane % ROW, lane % ROW
    everywhere = np.ones(len(lane), np.bool_)
    if name == "quad_perm":
        order = np.array([int(digit) for digit in re.findall(r"\d", value)])
        return lane - lane % 4 + order[lane % 4], everywhere
    if name == "row_mirror":
        return row + 15 - place, everywhere
    if name == "row_half_mirror":
        return lane ^ 7, everywhere
    count = int(value, 0)
    if name == "row_bcast":  # the last thread of 16 or 32 to all of the next ones
        return lane - lane % (count + 1) - 1, lane > count
    if name in ("row_shr", "row_shl"):
        source = place - count if name == "row_shr" else place + count
        return row + source, (source >= 0) & (source < ROW)
    sources = {
        "row_ror": row + (place - count) % ROW,
        "row_xmask": lane ^ count,
        "row_share": row + count,
        "row_newbcast": row + count,
    }
    return (sources[name], everywhere) if name in sources else None


def _source_on(waves: Waves, words: Reader) -> Array:
    """A register, with 0 for threads that are off."""
    found = np.broadcast_to(words(waves), (waves.count, waves.lanes))
    return found if waves.all_on else np.where(waves.on, found, np.uint32(0))


def permlane_16(crossed: bool) -> Builder:
    """Any thread of a row, or of the other row of two, given by 16 numbers of four bits."""

    def build(instruction: Instruction, target: Target) -> Operation:
        if target.lanes != 32 or set(instruction.modifiers) - {"op_sel"}:
            raise instruction.unknown("form")
        into = vector_register(instruction, instruction.operands[0])
        words = read_words(instruction, instruction.operands[1])
        low, high = (read_scalar(instruction, text, "i32") for text in instruction.operands[2:4])
        all_sources, zeroed = (
            digit == "1" for digit in re.findall(r"\d", instruction.modifiers.get("op_sel", "[0,0]"))
        )
        lane = np.arange(target.lanes)
        row = (lane ^ ROW if crossed else lane) & ~(ROW - 1)

        def run(waves: Waves) -> None:
            select = np.where(lane % ROW < 8, low(waves)[:, None], high(waves)[:, None])
            source = row + ((select >> (4 * (lane % 8))) & 15)
            found = np.take_along_axis(np.broadcast_to(words(waves), source.shape), source, axis=1)
            if all_sources or waves.all_on:
                return waves.write_vector(into, found)
            valid = np.take_along_axis(waves.on, source, axis=1)
            return waves.write_vector(into, np.where(valid, found, np.uint32(0)), None if zeroed else valid)

        return run

    return build


def permlane_64(instruction: Instruction, target: Target) -> Operation:
    """The other half of a wave of 64 threads; with 32 nothing is moved."""
    into = vector_register(instruction, instruction.operands[0])
    words = read_words(instruction, instruction.operands[1])
    return lambda waves: waves.write_vector(
        into, np.roll(words(waves), waves.lanes // 2 if waves.lanes == 64 else 0, 1)
    )


def swapped_rows(width: int) -> Builder:
    """Exchange the odd rows of one register with the even rows of another, in rows of some threads."""

    def build(instruction: Instruction, target: Target) -> Operation:
        if instruction.modifiers:
            raise instruction.unknown("modifier")
        x, y = (vector_register(instruction, text) for text in instruction.operands)
        lane = np.arange(target.lanes)
        odd, other = (lane // width) % 2 == 1, lane ^ width

        def run(waves: Waves) -> None:
            first, second = waves.vector[x].copy(), waves.vector[y].copy()
            waves.write_vector(x, np.where(odd, second[:, other], first))
            waves.write_vector(y, np.where(odd, second, first[:, other]))

        return run

    return build


def swizzled(instruction: Instruction, target: Target) -> Operation:
    """Threads exchanged within 32, by a pattern that is written out."""
    found = SWAPS.fullmatch(instruction.modifiers.get("offset", ""))
    if found is None or len(instruction.modifiers) > 1:
        raise instruction.unknown("pattern")
    into = vector_register(instruction, instruction.operands[0])
    words = read_words(instruction, instruction.operands[1])
    source = np.arange(target.lanes) ^ (int(found[2]) - (found[1] == "REVERSE"))
    return lambda waves: waves.write_vector(into, _source_on(waves, words)[:, source])


def permuted(instruction: Instruction, target: Target) -> Operation:
    """Each thread reads from the thread with its number, times 4."""
    if instruction.modifiers:
        raise instruction.unknown("modifier")
    into = vector_register(instruction, instruction.operands[0])
    address, words = (read_words(instruction, text) for text in instruction.operands[1:3])

    def run(waves: Waves) -> None:
        found = _source_on(waves, words)
        source = np.broadcast_to((address(waves) >> np.uint32(2)) % waves.lanes, found.shape).astype(np.int64)
        waves.write_vector(into, np.take_along_axis(found, source, axis=1))

    return run


def read_lane(instruction: Instruction, target: Target) -> Operation:
    """One thread's number, for the wave."""
    words = read_words(instruction, instruction.operands[1])
    lane = read_scalar(instruction, instruction.operands[2])
    write = write_scalar(instruction, instruction.operands[0])
    return lambda waves: write(waves, words(waves)[np.arange(waves.count), lane(waves) % waves.lanes])


def read_first_lane(instruction: Instruction, target: Target) -> Operation:
    """The number of the first active thread, or of the first thread if none is active."""
    words = read_words(instruction, instruction.operands[1])
    write = write_scalar(instruction, instruction.operands[0])

    def run(waves: Waves) -> None:
        found = np.broadcast_to(words(waves), (waves.count, waves.lanes))
        write(waves, found[np.arange(waves.count), waves.on.argmax(axis=1)])

    return run


def counted_below(first: int) -> Builder:
    """The number of bits that are set below each thread in 32 threads from ``first`` on, plus a number."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into = vector_register(instruction, instruction.operands[0])
        bits, more = (read_words(instruction, text) for text in instruction.operands[1:3])
        below = np.clip(np.arange(target.lanes) - first, 0, 32).astype(np.uint64)
        mask = ((np.uint64(1) << below) - np.uint64(1)).astype(np.uint32)
        return lambda waves: waves.write_vector(
            into, np.bitwise_count(bits(waves) & mask).astype(np.uint32) + more(waves)
        )

    return build


INSTRUCTIONS: dict[str, Builder] = {
    "v_permlane16_b32": permlane_16(crossed=False),
    "v_permlanex16_b32": permlane_16(crossed=True),
    "v_permlane64_b32": permlane_64,
    "v_permlane16_swap_b32": swapped_rows(16),
    "v_permlane32_swap_b32": swapped_rows(32),
    "ds_swizzle_b32": swizzled,
    "ds_bpermute_b32": permuted,
    "v_readlane_b32": read_lane,
    "v_readfirstlane_b32": read_first_lane,
    "v_mbcnt_lo_u32_b32": counted_below(0),
    "v_mbcnt_hi_u32_b32": counted_below(32),
}
