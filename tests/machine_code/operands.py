"""Operands of instructions, bound once to what reads and writes them.

A type is the interpretation of bits: "u32", "i32", "f32" one register; "u64", "i64" two; "f16", "u16" half a register.
A reader returns an array that broadcasts to [waves, threads]; one of a scalar operation returns one number per wave.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.machine_code.assembly import Instruction, Target
from tests.machine_code.memory import Array
from tests.machine_code.waves import EXEC, FULL, TTMP, VCC, Mask, Waves

Operation = Callable[[Waves], None]
Builder = Callable[[Instruction, Target], Operation]
Reader = Callable[[Waves], Array]
Writer = Callable[[Waves, Array], None]
DTYPES: dict[str, type[np.generic]] = {
    "u32": np.uint32, "i32": np.int32, "f32": np.float32, "u64": np.uint64, "i64": np.int64, "u16": np.uint16,
    "f16": np.float16,
}  # fmt: skip
REGISTER = re.compile(r"(v|s|ttmp)(?:(\d+)|\[(\d+):(\d+)\])(\.[lh])?")
NAMED = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1}
SIGNS = {"f32": (np.uint32(0x80000000), np.uint32(0x7FFFFFFF)), "f16": (np.uint32(0x8000), np.uint32(0x7FFF))}


@dataclass(frozen=True)
class Register:
    """kind: "v" or "s". half: "", "l" or "h"."""

    kind: str
    number: int
    half: str = ""


@cache
def register_of(text: str) -> Register | None:
    """The first register of an operand, or None if it is something else."""
    if text in NAMED:
        return Register("s", NAMED[text])
    found = REGISTER.fullmatch(text)
    if found is None:
        return None
    number = int(found[2] or found[3]) + (TTMP if found[1] == "ttmp" else 0)
    return Register("v" if found[1] == "v" else "s", number, (found[5] or "")[1:])


def scalar_register(instruction: Instruction, text: str) -> int:
    """The number of an operand that has to be a scalar register."""
    register = register_of(text)
    if register is None or register.kind != "s":
        raise instruction.unknown(f"operand {text!r}")
    return register.number


def vector_register(instruction: Instruction, text: str) -> int:
    """As ``scalar_register``."""
    register = register_of(text)
    if register is None or register.kind != "v" or register.half:
        raise instruction.unknown(f"operand {text!r}")
    return register.number


@cache
def constant(text: str, dtype: str) -> int | None:
    """The bits of a number, as an operand of a type; None if it is none."""
    if text == "null":
        return 0
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return int(text, 0)
    if re.fullmatch(r"-?\d+\.\d+(e[+-]?\d+)?", text):
        half = dtype in ("f16", "u16")
        return int(np.float16(text).view(np.uint16)) if half else int(np.float32(text).view(np.uint32))
    return None


@cache
def _unsigned(text: str) -> tuple[str, bool, bool]:
    """(operand without signs, negated, its size alone counts)."""
    negated = absolute = False
    found = re.fullmatch(r"-([vs|].*|ttmp.*)|neg\((.*)\)", text)
    if found:
        negated, text = True, found[1] or found[2]
    found = re.fullmatch(r"\|(.*)\||abs\((.*)\)", text)
    if found:
        absolute, text = True, found[1] or found[2]
    return text, negated, absolute


def read_words(instruction: Instruction, text: str, dtype: str = "u32", part: int = 0) -> Reader:
    """The bits of one register (``part``: of the second one), or of a number."""
    register = register_of(text)
    if register is None:
        bits = constant(text, dtype)
        if text in ("scc", "src_scc"):
            return lambda waves: waves.scc.astype(np.uint32)[:, None]
        if bits is None:
            raise instruction.unknown(f"operand {text!r}")
        words = np.array([[(bits >> (32 * part)) & 0xFFFFFFFF]], np.uint32)
        return lambda waves: words
    number = register.number + part
    if register.kind == "s":
        return lambda waves: waves.scalar[number][:, None]
    if register.half:
        shift = np.uint32(16 if register.half == "h" else 0)
        return lambda waves: (waves.vector[number] >> shift) & np.uint32(0xFFFF)
    return lambda waves: waves.vector[number]


def read(instruction: Instruction, text: str, dtype: str, select: str = "DWORD") -> Reader:
    """A source of a vector operation. ``select``: the part of the register that is used (sub-dword addressing)."""
    extended = re.fullmatch(r"sext\((v\d+)\)", text)
    text, negated, absolute = _unsigned(text) if extended is None else (extended[1], False, False)
    words = _selected(instruction, read_words(instruction, text, dtype), select, extended is not None)
    if negated or absolute:
        if dtype not in SIGNS:
            raise instruction.unknown(f"sign of {text!r}")
        words = _signed(words, negated, absolute, *SIGNS[dtype])
    return as_type(words, dtype, lambda: read_words(instruction, text, dtype, 1))


def as_type(words: Reader, dtype: str, second: Callable[[], Reader]) -> Reader:
    """See bits as a type; ``second`` makes the reader of the second register where there are two."""
    seen = DTYPES[dtype]
    if dtype in ("u64", "i64"):
        high = second()
        return lambda waves: (
            words(waves).astype(np.uint64) | (high(waves).astype(np.uint64) << np.uint64(32))
        ).view(seen)  # fmt: skip
    if dtype in ("f16", "u16"):
        return lambda waves: words(waves).astype(np.uint16).view(seen)
    return words if dtype == "u32" else lambda waves: words(waves).view(seen)


def _signed(words: Reader, negated: bool, absolute: bool, sign: Any, rest: Any) -> Reader:
    def read(waves: Waves) -> Array:
        found = words(waves)
        found = found & rest if absolute else found
        return found ^ sign if negated else found

    return read


def _selected(instruction: Instruction, words: Reader, select: str, signed: bool = False) -> Reader:
    if select == "DWORD":
        return words
    found = re.fullmatch(r"(WORD|BYTE)_(\d)", select)
    if found is None:
        raise instruction.unknown(f"selection {select}")
    width = 16 if found[1] == "WORD" else 8
    shift, mask = np.uint32(width * int(found[2])), np.uint32((1 << width) - 1)
    sign = np.uint32(1 << (width - 1) if signed else 0)
    return lambda waves: (((words(waves) >> shift) & mask) ^ sign) - sign


def write(instruction: Instruction, text: str, dtype: str, where: Callable[[Waves], Mask] | None = None) -> Writer:
    """The destination of a vector operation; only threads that are on, and in ``where``, are written."""
    register = register_of(text)
    if register is None or register.kind != "v":
        raise instruction.unknown(f"destination {text!r}")
    number = register.number
    if dtype in ("f16", "u16"):
        return _write_half(number, 16 if register.half == "h" else 0, where)
    if register.half:
        raise instruction.unknown(f"destination {text!r}")
    if dtype in ("u64", "i64"):
        return lambda waves, value: write_long(waves, number, value, where and where(waves))
    return lambda waves, value: waves.write_vector(number, value.view(np.uint32), where and where(waves))


def write_long(waves: Waves, number: int, value: Array, where: Mask | None = None) -> None:
    """Write 64 bits to two vector registers."""
    bits = value.view(np.uint64)
    waves.write_vector(number, bits.astype(np.uint32), where)
    waves.write_vector(number + 1, (bits >> np.uint64(32)).astype(np.uint32), where)


def _write_half(number: int, shift: int, where: Callable[[Waves], Mask] | None) -> Writer:
    keep, up = FULL ^ np.uint32(0xFFFF << shift), np.uint32(shift)

    def write(waves: Waves, value: Array) -> None:
        bits = value.view(np.uint16).astype(np.uint32) << up
        waves.write_vector(number, (waves.vector[number] & keep) | bits, where and where(waves))

    return write


def read_mask(instruction: Instruction, text: str) -> Callable[[Waves], Mask]:
    """A scalar operand with one bit per thread."""
    register = register_of(text)
    if register is not None and register.kind == "s":
        number = register.number
        return lambda waves: waves.mask(number)
    if text in ("0", "-1"):
        return lambda waves: np.full((waves.count, waves.lanes), text == "-1")
    raise instruction.unknown(f"operand {text!r}")


def write_mask(instruction: Instruction, text: str) -> Callable[[Waves, Mask], None]:
    """A scalar destination with one bit per thread; bits of threads that are off are 0."""
    if text == "null":
        return lambda waves, mask: None
    number = scalar_register(instruction, text)

    def write(waves: Waves, mask: Mask) -> None:
        mask = np.broadcast_to(mask, (waves.count, waves.lanes))
        waves.write_mask(number, np.array(mask) if waves.all_on else mask & waves.on)

    return write


def read_scalar(instruction: Instruction, text: str, dtype: str = "u32") -> Reader:
    """A source of a scalar operation: one number per wave."""
    reader = read(instruction, text, dtype)
    return lambda waves: np.broadcast_to(reader(waves)[:, 0], waves.count)


def write_scalar(instruction: Instruction, text: str, dtype: str = "u32") -> Writer:
    """The destination of a scalar operation."""
    if text == "null":
        return lambda waves, value: None
    number = scalar_register(instruction, text)
    if dtype in ("u64", "i64"):
        return lambda waves, value: write_scalar_long(waves, number, value)
    return lambda waves, value: waves.write_scalar(number, value.view(np.uint32))


def write_scalar_long(waves: Waves, number: int, value: Array) -> None:
    """Write 64 bits to two scalar registers."""
    bits = value.view(np.uint64)
    waves.write_scalar(number, bits.astype(np.uint32))
    waves.write_scalar(number + 1, (bits >> np.uint64(32)).astype(np.uint32))
