"""Conversions, half precision, and vector instructions that compute two numbers at once."""

from __future__ import annotations

import re

import numpy as np

from tests.machine_code.arithmetic import Function, fma
from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.memory import Array, Words
from tests.machine_code.operands import (
    Builder,
    Operation,
    Reader,
    constant,
    read,
    read_words,
    register_of,
    vector_register,
    write,
)
from tests.machine_code.vector import Computed, alu, applied, sources_of
from tests.machine_code.waves import Waves

HIGH = np.uint32(0xFFFF0000)
LOW = np.uint32(0xFFFF)


def to_half(x: Array) -> Array:
    return x.astype(np.float16)


def to_bfloat(x: Array) -> Words:
    """The upper half of float32 numbers, rounded to nearest even, as uint32; NaN stays NaN."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded)


def half_words(x: Array) -> Words:
    """The bits of float16 numbers, as uint32."""
    return x.view(np.uint16).astype(np.uint32)


def to_f16(function: Function, *types: str) -> Builder:
    """An operation with a result of half a register. The other half becomes 0 on gfx9 and stays on newer ones."""

    def build(instruction: Instruction, target: Target) -> Operation:
        into, *texts = instruction.operands
        readers, where = sources_of(instruction, target, tuple(texts), types)
        if target.major > 9:
            return Computed(applied(function, readers), write(instruction, into, "f16", where))
        return Computed(
            applied(lambda *x: half_words(function(*x)), readers), write(instruction, into, "u32", where)
        )  # fmt: skip

    return build


def _choices(instruction: Instruction, key: str, usual: int, count: int) -> list[int]:
    """A modifier with one digit per source ("op_sel:[0,1]")."""
    given = [int(digit) for digit in re.findall(r"\d", instruction.modifiers.get(key, ""))]
    return given or [usual] * count


def _only(instruction: Instruction, *known: str) -> None:
    if set(instruction.modifiers) - set(known):
        raise instruction.unknown("modifier")


def pair_of_f32(function: Function) -> Builder:
    """Two float32 in two registers. op_sel, op_sel_hi: which register of each source makes the first, the second."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _only(instruction, "op_sel", "op_sel_hi", "neg_lo", "neg_hi")
        into, *texts = instruction.operands
        number = vector_register(instruction, into)
        halves = []
        for select, sign, usual in (("op_sel", "neg_lo", 0), ("op_sel_hi", "neg_hi", 1)):
            parts = _choices(instruction, select, usual, len(texts))
            signs = _choices(instruction, sign, 0, len(texts))
            readers = [_f32(instruction, *source) for source in zip(texts, parts, signs, strict=True)]
            halves.append(applied(function, readers))
        first, second = halves

        def run(waves: Waves) -> None:
            low, high = first(waves).view(np.uint32).copy(), second(waves).view(np.uint32)
            waves.write_vector(number + 1, high)
            waves.write_vector(number, low)

        return run

    return build


def _f32(instruction: Instruction, text: str, part: int, negated: int) -> Reader:
    if part and constant(text, "f32") is not None:
        raise instruction.unknown(f"second half of {text!r}")
    words = read_words(instruction, text, "f32", part)
    sign = np.uint32(0x80000000 if negated else 0)
    return lambda waves: (words(waves) ^ sign).view(np.float32)


def moved_pair(instruction: Instruction, target: Target) -> Operation:
    """One register of each of two sources."""
    _only(instruction, "op_sel", "op_sel_hi")
    number = vector_register(instruction, instruction.operands[0])
    parts = _choices(instruction, "op_sel", 0, 2)
    x, y = (
        read_words(instruction, text, "u32", part) for text, part in zip(instruction.operands[1:], parts, strict=True)
    )

    def run(waves: Waves) -> None:
        low, high = x(waves).copy(), y(waves)
        waves.write_vector(number + 1, high)
        waves.write_vector(number, low)

    return run


def pair_of_halves(function: Function, dtype: str = "f16") -> Builder:
    """Two numbers of 16 bits in one register. op_sel, op_sel_hi: which halves make the low and the high one."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _only(instruction, "op_sel", "op_sel_hi")
        into, *texts = instruction.operands
        halves = []
        for key, usual in (("op_sel", 0), ("op_sel_hi", 1)):
            parts = _choices(instruction, key, usual, len(texts))
            if any(
                register_of(text) is None and (part or dtype == "f16") for text, part in zip(texts, parts, strict=True)
            ):
                raise instruction.unknown("operand")
            readers = [_half(instruction, text, part, dtype) for text, part in zip(texts, parts, strict=True)]
            halves.append(applied(function, readers))
        low, high = halves
        return Computed(
            lambda waves: half_words(low(waves)) | (half_words(high(waves)) << np.uint32(16)),
            write(instruction, into, "u32"),
        )

    return build


def _half(instruction: Instruction, text: str, high: int, dtype: str = "f16") -> Reader:
    return read(instruction, text, dtype, f"WORD_{high}")


def mixed(half: str) -> Builder:
    """A product and sum of float32 and float16 sources. ``half``: "", or where the result goes as float16.

    op_sel_hi: the sources that are float16. op_sel: the ones that are upper halves.
    """

    def build(instruction: Instruction, target: Target) -> Operation:
        _only(instruction, "op_sel", "op_sel_hi")
        into, *texts = instruction.operands
        upper, narrow = _choices(instruction, "op_sel", 0, 3), _choices(instruction, "op_sel_hi", 0, 3)
        x, y, z = (_mixed_source(instruction, *source) for source in zip(texts, upper, narrow, strict=True))
        if not half:
            return Computed(lambda waves: fma(x(waves), y(waves), z(waves)), write(instruction, into, "f32"))
        store = write(instruction, f"{into}.{half}", "f16")
        return lambda waves: store(waves, to_half(fma(x(waves), y(waves), z(waves))))

    return build


def _mixed_source(instruction: Instruction, text: str, upper: int, narrow: int) -> Reader:
    if not narrow:
        return read(instruction, text, "f32")
    half = _half(instruction, text, upper) if upper else read(instruction, text, "f16")
    return lambda waves: half(waves).astype(np.float32)


def packed(function: Function, dtype: str) -> Builder:
    """Two numbers, converted to 16 bits each, in one register."""

    def build(instruction: Instruction, target: Target) -> Operation:
        _only(instruction)
        into, first, second = instruction.operands
        x, y = read(instruction, first, dtype), read(instruction, second, dtype)
        return Computed(
            lambda waves: function(x(waves)) | (function(y(waves)) << np.uint32(16)), write(instruction, into, "u32")
        )  # fmt: skip

    return build


INSTRUCTIONS: dict[str, Builder] = {
    "v_cvt_f32_f16": alu("f32", lambda x: x.astype(np.float32), "f16"),
    "v_cvt_f16_f32": to_f16(to_half, "f32"),
    "v_add_f16": to_f16(lambda x, y: x + y, "f16", "f16"),
    "v_mul_f16": to_f16(lambda x, y: x * y, "f16", "f16"),
    "v_cvt_pk_f16_f32": packed(lambda x: half_words(to_half(x)), "f32"),
    "v_cvt_pk_bf16_f32": packed(to_bfloat, "f32"),
    "v_pack_b32_f16": packed(half_words, "f16"),
    "v_fma_mix_f32": mixed(""),
    "v_fma_mixlo_f16": mixed("l"),
    "v_fma_mixhi_f16": mixed("h"),
    "v_pk_add_f16": pair_of_halves(lambda x, y: x + y),
    "v_pk_mul_f16": pair_of_halves(lambda x, y: x * y),
    "v_pk_lshlrev_b16": pair_of_halves(lambda n, x: x << (n & np.uint16(15)), "u16"),
    "v_pk_add_f32": pair_of_f32(lambda x, y: x + y),
    "v_pk_mul_f32": pair_of_f32(lambda x, y: x * y),
    "v_pk_fma_f32": pair_of_f32(fma),
    "v_pk_mov_b32": moved_pair,
}
