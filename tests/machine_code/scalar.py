"""Scalar instructions: one number per wave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tests.machine_code.arithmetic import (
    COMPARISONS,
    Function,
    bit_field,
    fma,
    high_product,
    reciprocal,
    reversed_bits,
    to_signed,
    to_unsigned,
    trailing_zeros,
)  # fmt: skip
from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.memory import Array
from tests.machine_code.operands import (
    Builder,
    Operation,
    Reader,
    read_mask,
    read_scalar,
    scalar_register,
    write_scalar,
)  # fmt: skip
from tests.machine_code.waves import EXEC, Mask, Waves

IGNORED = re.compile(
    r"s_(waitcnt.*|wait_(?!event).*|delay_alu|clause|nop|sendmsg|set_inst_prefetch_distance|code_end)"
    r"|buffer_gl[01]_inv|global_inv|global_wb"
)
"""Waits, hints and caches: memory here is never late."""


def is_ignored(instruction: Instruction) -> bool:
    """Whether an instruction does nothing that is modelled."""
    return IGNORED.fullmatch(instruction.name) is not None


def plain(result: str, function: Function, *sources: str, scc: bool = False) -> Builder:
    """An operation of sources of some types. ``scc``: the flag shows whether the result is not 0."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 1 + len(sources))
        readers = [read_scalar(instruction, text, t) for text, t in zip(instruction.operands[1:], sources, strict=True)]
        write = write_scalar(instruction, instruction.operands[0], result)

        def run(waves: Waves) -> None:
            value = function(*[reader(waves) for reader in readers])
            write(waves, value)
            if scc:
                waves.scc = value != 0

        return run

    return build


def summed(sign: int, dtype: str, carry: bool = False) -> Builder:
    """Sums and differences, with carry or overflow in the flag."""
    low, high = (0, 0xFFFFFFFF) if dtype == "u32" else (-0x80000000, 0x7FFFFFFF)

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 3)
        x, y = (read_scalar(instruction, text, dtype) for text in instruction.operands[1:])
        write = write_scalar(instruction, instruction.operands[0])

        def run(waves: Waves) -> None:
            more = y(waves).astype(np.int64) + (waves.scc if carry else 0)
            total = x(waves).astype(np.int64) + sign * more
            write(waves, (total & 0xFFFFFFFF).astype(np.uint32))
            waves.scc = (total < low) | (total > high)

        return run

    return build


def shifted_sum(places: int) -> Builder:
    """(x << places) + y, with the carry in the flag."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 3)
        x, y = (read_scalar(instruction, text) for text in instruction.operands[1:])
        write = write_scalar(instruction, instruction.operands[0])

        def run(waves: Waves) -> None:
            total = (x(waves).astype(np.uint64) << np.uint64(places)) + y(waves)
            write(waves, total.astype(np.uint32))
            waves.scc = total > 0xFFFFFFFF

        return run

    return build


def extreme(function: Function, dtype: str) -> Builder:
    """The larger or smaller of two; the flag shows whether it is the first."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 3)
        x, y = (read_scalar(instruction, text, dtype) for text in instruction.operands[1:])
        write = write_scalar(instruction, instruction.operands[0])

        def run(waves: Waves) -> None:
            first, second = x(waves), y(waves)
            value = function(first, second)
            write(waves, value)
            waves.scc = (value == first) & (first != second)

        return run

    return build


def selected(dtype: str) -> Builder:
    """One of two, by the flag."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 3)
        x, y = (read_scalar(instruction, text, dtype) for text in instruction.operands[1:])
        write = write_scalar(instruction, instruction.operands[0], dtype)
        return lambda waves: write(waves, np.where(waves.scc, x(waves), y(waves)))

    return build


def compared(how: str, dtype: str) -> Builder:
    """A comparison into the flag."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        x, y = (read_scalar(instruction, text, dtype) for text in instruction.operands)

        def run(waves: Waves) -> None:
            waves.scc = np.array(COMPARISONS[how](x(waves), y(waves)))

        return run

    return build


def compared_with_number(how: str, dtype: str) -> Builder:
    """A comparison with a number of 16 bits into the flag. Only the number of a signed comparison keeps its sign."""

    def rewritten(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        number = int(instruction.operands[1], 0) & 0xFFFF
        number = (number ^ 0x8000) - 0x8000 if dtype == "i32" else number
        return compared(how, dtype)(replace(instruction, operands=(instruction.operands[0], str(number))), target)

    return rewritten


def bit_compared(wanted: int) -> Builder:
    """Whether a bit of a number has a value, into the flag."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        x, place = (read_scalar(instruction, text) for text in instruction.operands)

        def run(waves: Waves) -> None:
            waves.scc = (x(waves) >> (place(waves) & 31)) & 1 == wanted

        return run

    return build


def save_exec(function: Callable[[Mask, Mask], Mask], lanes: int) -> Builder:
    """Save the active threads; set them again from the saved ones and a mask; the flag shows whether any is on."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        if target.lanes != lanes:
            raise instruction.unknown("width")
        kept, given = (
            scalar_register(instruction, instruction.operands[0]),
            read_mask(instruction, instruction.operands[1]),
        )

        def run(waves: Waves) -> None:
            before, mask = waves.on, given(waves)
            waves.write_mask(kept, before)
            after = function(before, mask)
            waves.write_mask(EXEC, after)
            waves.scc = np.asarray(after.any(axis=1))

        return run

    return build


def with_number(build: Builder) -> Builder:
    """An operation of the destination and a number of 16 bits, which keeps its sign."""

    def rewritten(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        number = ((int(instruction.operands[1], 0) & 0xFFFF) ^ 0x8000) - 0x8000
        return build(replace(instruction, operands=(*instruction.operands[:1] * 2, str(number))), target)

    return rewritten


def changed(build: Builder) -> Builder:
    """An operation of the destination and one source."""

    def rewritten(instruction: Instruction, target: Target) -> Operation:
        _expect(instruction, 2)
        destination, source = instruction.operands
        return build(replace(instruction, operands=(destination, destination, source)), target)

    return rewritten


def moved_number(instruction: Instruction, target: Target) -> Operation:
    """A number of 16 bits, which keeps its sign."""
    _expect(instruction, 2)
    number = ((int(instruction.operands[1], 0) & 0xFFFF) ^ 0x8000) - 0x8000
    write = write_scalar(instruction, instruction.operands[0])
    return lambda waves: write(waves, np.full(waves.count, number, np.int32))


def multiplied_and_added(instruction: Instruction, target: Target) -> Operation:
    """The destination plus the product of two, rounded once."""
    x, y, z = (read_scalar(instruction, text, "f32") for text in (*instruction.operands[1:], instruction.operands[0]))
    write = write_scalar(instruction, instruction.operands[0])
    return lambda waves: write(waves, fma(x(waves), y(waves), z(waves)))


def loaded(words: int) -> Builder:
    """Words of memory, from an address plus a number or register."""

    def build(instruction: Instruction, target: Target) -> Operation:
        if set(instruction.modifiers) - {"offset"}:
            raise instruction.unknown("modifier")
        first = scalar_register(instruction, instruction.operands[0])
        address = read_scalar(instruction, instruction.operands[1], "u64")
        offset = _offset(instruction)
        more = int(instruction.modifiers.get("offset", "0"), 0)

        def run(waves: Waves) -> None:
            at = address(waves).astype(np.int64) + offset(waves).astype(np.int64) + more
            found = waves.buffers.load(at, 4 * words)
            for part in range(words):
                waves.write_scalar(first + part, found[:, part])

        return run

    return build


def _offset(instruction: Instruction) -> Reader:
    return read_scalar(instruction, instruction.operands[2] if len(instruction.operands) > 2 else "0")


def _expect(instruction: Instruction, count: int) -> None:
    if len(instruction.operands) != count or instruction.modifiers:
        raise instruction.unknown("form")


def _field(x: Array, place: Array) -> Array:
    return bit_field(x, place & np.uint32(31), (place >> np.uint32(16)) & np.uint32(0x7F))


def _of_width(width: int) -> dict[str, Builder]:
    """Operations that exist for 32 and 64 bits."""
    b, u, i, last = f"b{width}", f"u{width}", f"i{width}", width - 1
    found = {
        f"s_mov_{b}": plain(u, lambda x: x, u),
        f"s_not_{b}": plain(u, lambda x: ~x, u, scc=True),
        f"s_lshl_{b}": plain(u, lambda x, n: x << (n & last).astype(x.dtype), u, "u32", scc=True),
        f"s_lshr_{b}": plain(u, lambda x, n: x >> (n & last).astype(x.dtype), u, "u32", scc=True),
        f"s_ashr_{i}": plain(i, lambda x, n: x >> (n & last).astype(x.dtype), i, "u32", scc=True),
        f"s_cselect_{b}": selected(u),
        f"s_bcnt1_i32_{b}": plain("u32", lambda x: np.bitwise_count(x).astype(np.uint32), u, scc=True),
        f"s_ctz_i32_{b}": plain("u32", trailing_zeros, u),
        f"s_cmp_eq_{u}": compared("eq", u),
        f"s_cmp_lg_{u}": compared("lg", u),
    }
    for name, function in LOGIC.items():
        found[f"s_{name}_{b}"] = plain(u, function, u, u, scc=True)
        found[f"s_{name}_saveexec_{b}"] = save_exec(SAVED[name], width)
    return found


LOGIC: dict[str, Function] = {
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "and_not1": lambda x, y: x & ~y,
    "or_not1": lambda x, y: x | ~y,
}
SAVED: dict[str, Callable[[Mask, Mask], Mask]] = {
    "and": lambda on, given: given & on,
    "or": lambda on, given: given | on,
    "xor": lambda on, given: given ^ on,
    "and_not1": lambda on, given: given & ~on,
    "or_not1": lambda on, given: given | ~on,
}
INSTRUCTIONS: dict[str, Builder] = {
    **_of_width(32),
    **_of_width(64),
    **{f"s_load_b{32 * words}": loaded(words) for words in (1, 2, 3, 4, 8, 16)},
    **{f"s_lshl{places}_add_u32": shifted_sum(places) for places in (1, 2, 3, 4)},
    **{
        f"s_cmpk_{how}_{dtype}": compared_with_number(how, dtype)
        for how in ("eq", "lg", "lt", "le", "gt", "ge")
        for dtype in ("i32", "u32")
    },
    **{
        f"s_cmp_{how}_{dtype}": compared(how, dtype)
        for how in ("eq", "lg", "lt", "le", "gt", "ge")
        for dtype in ("i32", "u32")
    },
    "s_bitcmp0_b32": bit_compared(0),
    "s_bitcmp1_b32": bit_compared(1),
    "s_movk_i32": moved_number,
    "s_addk_i32": with_number(summed(1, "i32")),
    "s_mulk_i32": with_number(plain("i32", lambda x, y: x * y, "i32", "i32")),
    "s_add_u32": summed(1, "u32"),
    "s_add_i32": summed(1, "i32"),
    "s_addc_u32": summed(1, "u32", carry=True),
    "s_sub_u32": summed(-1, "u32"),
    "s_sub_i32": summed(-1, "i32"),
    "s_subb_u32": summed(-1, "u32", carry=True),
    "s_min_i32": extreme(np.minimum, "i32"),
    "s_min_u32": extreme(np.minimum, "u32"),
    "s_max_i32": extreme(np.maximum, "i32"),
    "s_max_u32": extreme(np.maximum, "u32"),
    "s_abs_i32": plain("i32", np.abs, "i32", scc=True),
    "s_mul_i32": plain("u32", lambda x, y: x * y, "u32", "u32"),
    "s_mul_hi_u32": plain("u32", high_product, "u32", "u32"),
    "s_mul_hi_i32": plain("i32", high_product, "i32", "i32"),
    "s_add_nc_u64": plain("u64", lambda x, y: x + y, "u64", "u64"),
    "s_sub_nc_u64": plain("u64", lambda x, y: x - y, "u64", "u64"),
    "s_mul_u64": plain("u64", lambda x, y: x * y, "u64", "u64"),
    "s_bfe_u32": plain("u32", _field, "u32", "u32", scc=True),
    "s_bfe_i32": plain("i32", _field, "i32", "u32", scc=True),
    "s_bitset0_b32": changed(plain("u32", lambda x, place: x & ~(np.uint32(1) << (place & 31)), "u32", "u32")),
    "s_bitset1_b32": changed(plain("u32", lambda x, place: x | (np.uint32(1) << (place & 31)), "u32", "u32")),
    "s_brev_b32": plain("u32", reversed_bits, "u32"),
    "s_sext_i32_i16": plain("i32", lambda x: x.astype(np.int16).astype(np.int32), "u32"),
    "s_add_f32": plain("f32", lambda x, y: x + y, "f32", "f32"),
    "s_sub_f32": plain("f32", lambda x, y: x - y, "f32", "f32"),
    "s_mul_f32": plain("f32", lambda x, y: x * y, "f32", "f32"),
    "s_fmac_f32": multiplied_and_added,
    "s_trunc_f32": plain("f32", np.trunc, "f32"),
    "s_cvt_f32_i32": plain("f32", lambda x: x.astype(np.float32), "i32"),
    "s_cvt_f32_u32": plain("f32", lambda x: x.astype(np.float32), "u32"),
    "s_cvt_u32_f32": plain("u32", to_unsigned, "f32"),
    "s_cvt_i32_f32": plain("u32", to_signed, "f32"),
    "v_s_rcp_f32": plain("f32", reciprocal, "f32"),
}
