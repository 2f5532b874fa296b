"""Vector instructions: one number per thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from tests.machine_code.arithmetic import (
    COMPARISONS,
    Function,
    aligned_bits,
    bit_field,
    bitwise,
    byte_as_float,
    exp2,
    exponent_bits,
    fixed_quotient,
    fma,
    high_product,
    permuted_bytes,
    reciprocal,
    reversed_bits,
    scaled_for_division,
    to_signed,
    to_unsigned,
)  # fmt: skip
from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.cross_lane import lane_move
from tests.machine_code.memory import Array, Words
from tests.machine_code.operands import (
    DTYPES,
    Builder,
    Operation,
    Reader,
    Writer,
    as_type,
    read,
    read_mask,
    read_words,
    vector_register,
    write,
    write_long,
    write_mask,
)  # fmt: skip
from tests.machine_code.waves import VCC, Mask, Waves

SELECTIONS = {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}
PARTS = {
    "BYTE_0": (8, 0),
    "BYTE_1": (8, 8),
    "BYTE_2": (8, 16),
    "BYTE_3": (8, 24),
    "WORD_0": (16, 0),
    "WORD_1": (16, 16),
}
"""Number of bits of a part of a register, and its place."""


@dataclass(frozen=True)
class Computed:
    """A vector operation in its two halves: all sources are read before anything is written."""

    compute: Reader
    store: Writer

    def __call__(self, waves: Waves) -> None:
        self.store(waves, self.compute(waves))


def sources_of(
    instruction: Instruction, target: Target, texts: tuple[str, ...], types: tuple[str, ...], to: str = "DWORD"
) -> tuple[list[Reader], Callable[[Waves], Mask] | None]:
    """Readers of the sources, and the threads that may be written (None: all active ones).

    ``to``: the part of the destination that the caller writes.

    Raises:
        UnknownInstructionError: a modifier that is not modelled.
    """
    if len(texts) != len(types):
        raise instruction.unknown("form")
    if instruction.form == "sdwa":
        if set(instruction.modifiers) - SELECTIONS or instruction.modifiers.get("dst_sel") != to:
            raise instruction.unknown("modifier")
        chosen = [instruction.modifiers.get(f"src{number}_sel", "DWORD") for number in range(len(texts))]
        readers = [read(instruction, *source) for source in zip(texts, types, chosen, strict=True)]
        return readers, None
    readers = [read(instruction, text, dtype) for text, dtype in zip(texts, types, strict=True)]
    if not instruction.form.endswith("dpp"):
        if instruction.modifiers:
            raise instruction.unknown("modifier")
        return readers, None
    move = lane_move(instruction, target)
    words = move.moved(read_words(instruction, texts[0], types[0]))
    readers[0] = as_type(words, types[0], lambda: move.moved(read_words(instruction, texts[0], types[0], 1)))
    return readers, move.written


def alu(result: str, function: Function, *types: str, accumulates: bool = False) -> Builder:
    """An operation of sources of some types. ``accumulates``: the destination is the last source."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, *texts = instruction.operands
        part = instruction.modifiers.get("dst_sel", "DWORD")
        readers, where = sources_of(instruction, target, tuple(texts), types, part)
        if accumulates:
            readers.append(read(instruction, into, result))
        if part == "DWORD":
            return Computed(applied(function, readers), write(instruction, into, result, where))
        if instruction.modifiers.get("dst_unused") != "UNUSED_PAD" or result not in ("u32", "i32", "f32"):
            raise instruction.unknown("modifier")
        return Computed(_into_part(applied(function, readers), *PARTS[part]), write(instruction, into, "u32", where))

    return build


def _into_part(compute: Reader, bits: int, place: int) -> Reader:
    """The low bits of a result at a place of the register, and zeros around them."""
    mask = np.uint32((1 << bits) - 1)

    def moved(waves: Waves) -> Words:
        return (np.ascontiguousarray(compute(waves)).view(np.uint32) & mask) << np.uint32(place)

    return moved


def applied(function: Function, readers: list[Reader]) -> Reader:
    """A function of what readers find."""
    if len(readers) == 1:
        (only,) = readers
        return lambda waves: function(only(waves))
    if len(readers) == 2:
        first, second = readers
        return lambda waves: function(first(waves), second(waves))
    return lambda waves: function(*[reader(waves) for reader in readers])


def compared(how: str, dtype: str, to_exec: bool) -> Builder:
    """A comparison into a mask, into the mask of threads that are on, or (gfx9) into both."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, texts = instruction.operands[:-2], instruction.operands[-2:]
        if len(into) != (0 if to_exec and target.major > 9 else 1):
            raise instruction.unknown("form")
        (x, y), _ = sources_of(instruction, target, texts, (dtype, dtype))
        function = COMPARISONS[how]
        writers = [write_mask(instruction, text) for text in (*into, *(["exec"] if to_exec else []))]

        def run(waves: Waves) -> None:
            mask = function(x(waves), y(waves))
            for writer in writers:
                writer(waves, mask)

        return run

    return build


def selected(dtype: str) -> Builder:
    """The second source where the bit of a mask is set, else the first."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, *texts = instruction.operands
        mask = read_mask(instruction, texts.pop() if len(texts) > 2 else "vcc")
        readers, where = sources_of(instruction, target, tuple(texts), (dtype, dtype))
        x, y = readers
        return Computed(
            lambda waves: np.where(mask(waves), y(waves), x(waves)), write(instruction, into, dtype, where)
        )  # fmt: skip

    return build


def carried(sign: int, swapped: bool, with_carry: bool) -> Builder:
    """Sums and differences with a carry for each thread, in a mask."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, out, *texts = instruction.operands
        given = read_mask(instruction, texts.pop()) if with_carry else None
        readers, where = sources_of(instruction, target, tuple(texts), ("u32", "u32"))
        x, y = reversed(readers) if swapped else readers
        store, carry = write(instruction, into, "u32", where), write_mask(instruction, out)

        def run(waves: Waves) -> None:
            total = x(waves).astype(np.int64) + sign * y(waves).astype(np.int64)
            if given is not None:
                total = total + sign * given(waves)
            store(waves, (total & 0xFFFFFFFF).astype(np.uint32))
            carry(waves, (total < 0) | (total > 0xFFFFFFFF))

        return run

    return build


def multiplied_wide(dtype: str, wide: str) -> Builder:
    """A product of 32-bit numbers plus one of 64 bits. Its carry, which compiled code does not use, becomes 0."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, carry, *texts = instruction.operands
        (x, y, z), _ = sources_of(instruction, target, tuple(texts), (dtype, dtype, wide))
        number, size = vector_register(instruction, into), DTYPES[wide]
        spoilt = None if carry == "null" else write_mask(instruction, carry)

        def run(waves: Waves) -> None:
            total = x(waves).astype(size) * y(waves).astype(size) + z(waves)
            write_long(waves, number, total)
            if spoilt is not None:
                spoilt(waves, np.zeros((1, 1), np.bool_))

        return run

    return build


def division_scaled(instruction: Instruction, target: Target) -> Operation:
    """The first step of a division: a source scaled, and a mask that shows whether the last step undoes it."""
    into, out, *texts = instruction.operands
    (x, divisor, dividend), _ = sources_of(instruction, target, tuple(texts), ("f32",) * 3)
    store, flags = write(instruction, into, "f32"), write_mask(instruction, out)

    def run(waves: Waves) -> None:
        value, flag = scaled_for_division(x(waves), divisor(waves), dividend(waves))
        store(waves, np.broadcast_to(value, (waves.count, waves.lanes)))
        flags(waves, flag)

    return run


def division_fma(instruction: Instruction, target: Target) -> Operation:
    """The last product and sum of a division, scaled back where the first step marked it."""
    into, *texts = instruction.operands
    (x, y, z), _ = sources_of(instruction, target, tuple(texts), ("f32",) * 3)
    store = write(instruction, into, "f32")

    def run(waves: Waves) -> None:
        addend = z(waves)
        value = fma(x(waves), y(waves), addend)
        back = np.where(exponent_bits(addend) > 127, np.ldexp(value, 64), np.ldexp(value, -64))
        store(waves, np.where(waves.mask(VCC), back, value))

    return run


def bitwise_operation(instruction: Instruction, target: Target) -> Operation:
    """A function of three bits that the instruction holds as a table."""
    into, *texts = instruction.operands
    readers = [read_words(instruction, text) for text in texts]
    if len(readers) != 3 or set(instruction.modifiers) != {"bitop3"}:
        raise instruction.unknown("form")
    function = bitwise(int(instruction.modifiers["bitop3"], 0))
    return Computed(applied(function, readers), write(instruction, into, "u32"))


def bitwise_halves(instruction: Instruction, target: Target) -> Operation:
    """``bitwise_operation`` on the low halves; gfx9, which has it, clears the high ones."""
    into, *texts = instruction.operands
    readers = [read_words(instruction, text) for text in texts]
    if target.major != 9 or len(readers) != 3 or set(instruction.modifiers) != {"bitop3"}:
        raise instruction.unknown("form")
    function = bitwise(int(instruction.modifiers["bitop3"], 0))
    low = np.uint32(0xFFFF)
    return Computed(applied(lambda *bits: function(*bits) & low, readers), write(instruction, into, "u32"))


def _low_bits(x: Array, bits: int) -> Array:
    """The low bits of numbers with signs."""
    shift = np.int32(32 - bits)
    return (x << shift) >> shift


def _halves(function: Function) -> Function:
    """A product of the low 24 bits."""
    return lambda x, y, *more: function(_low_bits(x, 24), _low_bits(y, 24), *more)


LOW_24 = np.uint32(0xFFFFFF)
UU, II, FF = ("u32", "u32"), ("i32", "i32"), ("f32", "f32")
INTEGERS: dict[str, Builder] = {
    "v_not_b32": alu("u32", lambda x: ~x, "u32"),
    "v_bfrev_b32": alu("u32", reversed_bits, "u32"),
    "v_and_b32": alu("u32", lambda x, y: x & y, *UU),
    "v_or_b32": alu("u32", lambda x, y: x | y, *UU),
    "v_xor_b32": alu("u32", lambda x, y: x ^ y, *UU),
    "v_or3_b32": alu("u32", lambda x, y, z: x | y | z, *UU, "u32"),
    "v_xor3_b32": alu("u32", lambda x, y, z: x ^ y ^ z, *UU, "u32"),
    "v_and_or_b32": alu("u32", lambda x, y, z: (x & y) | z, *UU, "u32"),
    "v_xad_u32": alu("u32", lambda x, y, z: (x ^ y) + z, *UU, "u32"),
    "v_bfi_b32": alu("u32", lambda mask, x, y: (mask & x) | (~mask & y), *UU, "u32"),
    "v_bitop3_b32": bitwise_operation,
    "v_bitop3_b16": bitwise_halves,
    "v_perm_b32": alu("u32", permuted_bytes, *UU, "u32"),
    "v_add_nc_u32": alu("u32", lambda x, y: x + y, *UU),
    "v_sub_nc_u32": alu("u32", lambda x, y: x - y, *UU),
    "v_subrev_nc_u32": alu("u32", lambda x, y: y - x, *UU),
    "v_add3_u32": alu("u32", lambda x, y, z: x + y + z, *UU, "u32"),
    "v_mul_lo_u32": alu("u32", lambda x, y: x * y, *UU),
    "v_mul_hi_u32": alu("u32", high_product, *UU),
    "v_mul_hi_i32": alu("i32", high_product, *II),
    "v_mul_i32_i24": alu("i32", _halves(lambda x, y: x * y), *II),
    "v_mad_i32_i24": alu("i32", _halves(lambda x, y, z: x * y + z), *II, "i32"),
    "v_mul_u32_u24": alu("u32", lambda x, y: (x & LOW_24) * (y & LOW_24), *UU),
    "v_mad_u32_u24": alu("u32", lambda x, y, z: (x & LOW_24) * (y & LOW_24) + z, *UU, "u32"),
    "v_min_i32": alu("i32", np.minimum, *II),
    "v_max_i32": alu("i32", np.maximum, *II),
    "v_max3_i32": alu("i32", lambda x, y, z: np.maximum(np.maximum(x, y), z), *II, "i32"),
    "v_max3_u32": alu("u32", lambda x, y, z: np.maximum(np.maximum(x, y), z), *UU, "u32"),
    "v_min_u32": alu("u32", np.minimum, *UU),
    "v_max_u32": alu("u32", np.maximum, *UU),
    "v_lshlrev_b32": alu("u32", lambda n, x: x << (n & 31), *UU),
    "v_lshrrev_b32": alu("u32", lambda n, x: x >> (n & 31), *UU),
    "v_ashrrev_i32": alu("i32", lambda n, x: x >> (n & 31), *II),
    "v_lshl_add_u32": alu("u32", lambda x, n, z: (x << (n & 31)) + z, *UU, "u32"),
    "v_lshl_or_b32": alu("u32", lambda x, n, z: (x << (n & 31)) | z, *UU, "u32"),
    "v_add_lshl_u32": alu("u32", lambda x, y, n: (x + y) << (n & 31), *UU, "u32"),
    "v_bfe_u32": alu("u32", lambda x, first, width: bit_field(x, first & 31, width & 31), *UU, "u32"),
    "v_bfe_i32": alu("i32", lambda x, first, width: bit_field(x, first & 31, width & 31), "i32", *UU),
    "v_and_b16": alu("u16", lambda x, y: x & y, "u16", "u16"),
    "v_or_b16": alu("u16", lambda x, y: x | y, "u16", "u16"),
    "v_lshlrev_b16": alu("u16", lambda n, x: x << (n & np.uint16(15)), "u16", "u16"),
    "v_lshrrev_b16": alu("u16", lambda n, x: x >> (n & np.uint16(15)), "u16", "u16"),
    "v_alignbit_b32": alu("u32", aligned_bits, *UU, "u32"),
    "v_lshrrev_b64": alu("u64", lambda n, x: x >> (n & 63).astype(np.uint64), "u32", "u64"),
    "v_lshlrev_b64": alu("u64", lambda n, x: x << (n & 63).astype(np.uint64), "u32", "u64"),
    "v_lshl_add_u64": alu("u64", lambda x, n, z: (x << (n & 7).astype(np.uint64)) + z, "u64", "u32", "u64"),
    "v_mad_u64_u32": multiplied_wide("u32", "u64"),
    "v_mad_i64_i32": multiplied_wide("i32", "i64"),
    "v_add_co_u32": carried(1, swapped=False, with_carry=False),
    "v_sub_co_u32": carried(-1, swapped=False, with_carry=False),
    "v_subrev_co_u32": carried(-1, swapped=True, with_carry=False),
    "v_add_co_ci_u32": carried(1, swapped=False, with_carry=True),
    "v_sub_co_ci_u32": carried(-1, swapped=False, with_carry=True),
    "v_subrev_co_ci_u32": carried(-1, swapped=True, with_carry=True),
}
FLOATS: dict[str, Builder] = {
    "v_add_f32": alu("f32", lambda x, y: x + y, *FF),
    "v_sub_f32": alu("f32", lambda x, y: x - y, *FF),
    "v_subrev_f32": alu("f32", lambda x, y: y - x, *FF),
    "v_mul_f32": alu("f32", lambda x, y: x * y, *FF),
    "v_max_f32": alu("f32", np.fmax, *FF),
    "v_min_f32": alu("f32", np.fmin, *FF),
    "v_max_num_f32": alu("f32", np.fmax, *FF),
    "v_max3_f32": alu("f32", lambda a, b, c: np.fmax(np.fmax(a, b), c), *FF, "f32"),
    "v_max3_num_f32": alu("f32", lambda a, b, c: np.fmax(np.fmax(a, b), c), *FF, "f32"),
    "v_min_num_f32": alu("f32", np.fmin, *FF),
    "v_fma_f32": alu("f32", fma, *FF, "f32"),
    "v_fmaak_f32": alu("f32", fma, *FF, "f32"),
    "v_fmamk_f32": alu("f32", fma, *FF, "f32"),
    "v_madmk_f32": alu("f32", lambda x, y, z: x * y + z, *FF, "f32"),
    "v_madak_f32": alu("f32", lambda x, y, z: x * y + z, *FF, "f32"),
    "v_fmac_f32": alu("f32", fma, *FF, accumulates=True),
    "v_mac_f32": alu("f32", lambda x, y, z: x * y + z, *FF, accumulates=True),
    "v_rcp_f32": alu("f32", reciprocal, "f32"),
    "v_rcp_iflag_f32": alu("f32", reciprocal, "f32"),
    "v_sqrt_f32": alu("f32", np.sqrt, "f32"),
    "v_rsq_f32": alu("f32", lambda x: reciprocal(np.sqrt(x)), "f32"),
    "v_exp_f32": alu("f32", exp2, "f32"),
    "v_log_f32": alu("f32", np.log2, "f32"),
    "v_rndne_f32": alu("f32", np.rint, "f32"),
    "v_trunc_f32": alu("f32", np.trunc, "f32"),
    "v_floor_f32": alu("f32", np.floor, "f32"),
    "v_ldexp_f32": alu("f32", np.ldexp, "f32", "i32"),
    "v_div_scale_f32": division_scaled,
    "v_div_fmas_f32": division_fma,
    "v_div_fixup_f32": alu("f32", fixed_quotient, *FF, "f32"),
    "v_cvt_f32_i32": alu("f32", lambda x: x.astype(np.float32), "i32"),
    **{f"v_cvt_f32_ubyte{at}": alu("f32", partial(byte_as_float, at), "u32") for at in range(4)},
    "v_cvt_f32_u32": alu("f32", lambda x: x.astype(np.float32), "u32"),
    "v_cvt_i32_f32": alu("u32", to_signed, "f32"),
    "v_cvt_u32_f32": alu("u32", to_unsigned, "f32"),
}
INSTRUCTIONS: dict[str, Builder] = {
    **INTEGERS,
    **FLOATS,
    **{
        f"v_cmp{'x' if to_exec else ''}_{how}_{dtype}": compared(how, dtype, to_exec)
        for how in COMPARISONS
        for dtype in ("f32", "f16", "i32", "u32", "i64", "u64")
        for to_exec in (False, True)
    },
    "v_mov_b32": alu("f32", lambda x: x, "f32"),
    "v_mov_b64": alu("u64", lambda x: x, "u64"),
    "v_mov_b16": alu("u16", lambda x: x, "u16"),
    "v_cndmask_b32": selected("f32"),
    "v_cndmask_b16": selected("f16"),
}
