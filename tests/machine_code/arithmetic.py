"""Arithmetic of the instructions, as functions of arrays."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.machine_code.memory import Array, Words

Function = Callable[..., Array]
SMALLEST = np.finfo(np.float32).tiny  # the smallest normal number


def _unordered(x: Array, y: Array) -> Array:
    found: Array = np.isnan(x) | np.isnan(y)
    return found


COMPARISONS: dict[str, Function] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lg": lambda x, y: (x < y) | (x > y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "o": lambda x, y: ~_unordered(x, y),
    "u": _unordered,
    "neq": lambda x, y: ~(x == y),
    "nlg": lambda x, y: ~((x < y) | (x > y)),
    "nlt": lambda x, y: ~(x < y),
    "nle": lambda x, y: ~(x <= y),
    "ngt": lambda x, y: ~(x > y),
    "nge": lambda x, y: ~(x >= y),
}
"""By the middle of the names of comparisons. With NaN those that begin with n, and u, are true."""


def fma(x: Array, y: Array, z: Array) -> Array:
    """``x * y + z`` of float32, rounded once.

    The product is exact in float64. An inexact sum gets an odd last bit, so that it rounds to float32 as the exact sum
    would (rounding to odd, Boldo and Melquiond 2008).
    """
    product, addend = np.multiply(x, y, dtype=np.float64), z.astype(np.float64)
    total = product + addend
    rounded = total - product
    lost = (product - (total - rounded)) + (addend - rounded)
    if (lost != 0).any():  # NaN of infinite sums counts too, and the mask below leaves these alone
        bits = total.view(np.int64)
        wrong = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
        away = np.where((lost > 0) == (total > 0), 1, -1)
        total = np.where(wrong, bits + away, bits).view(np.float64)
    return total.astype(np.float32)


def exponent_bits(x: Array) -> Array:
    """The biased exponent of float32 numbers."""
    return ((x.view(np.uint32) >> np.uint32(23)) & np.uint32(0xFF)).astype(np.int64)


def exp2(x: Array) -> Array:
    """Two to a power, where numbers below the smallest normal one become 0."""
    found = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(found < SMALLEST, np.float32(0), found)  # NaN stays


def reciprocal(x: Array) -> Array:
    return np.float32(1) / x


def to_integer(low: int, high: int) -> Function:
    """Cut off the fraction, and keep within limits; NaN becomes 0."""

    def convert(x: Array) -> Array:
        whole = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=high, neginf=low)
        found: Words = np.clip(whole, low, high).astype(np.int64).astype(np.uint32)
        return found

    return convert


to_unsigned, to_signed = to_integer(0, 0xFFFFFFFF), to_integer(-0x80000000, 0x7FFFFFFF)


def bit_field(x: Array, first: Array, width: Array) -> Array:
    """Some bits of 32-bit numbers, with the sign of the highest where the numbers have signs."""
    up = np.maximum(32 - (first + width).astype(np.int64), 0).astype(x.dtype)
    found: Array = (x << up) >> np.minimum(up + first.astype(x.dtype), 31)
    return np.where(width == 0, np.zeros_like(x), found)


def high_product(x: Array, y: Array) -> Array:
    """The upper half of a product of 32-bit numbers."""
    wide = np.int64 if x.dtype.kind == "i" else np.uint64
    return ((x.astype(wide) * y.astype(wide)) >> wide(32)).astype(x.dtype)


def reversed_bits(x: Array) -> Array:
    """The bits of uint32 numbers from the last to the first."""
    bits = np.unpackbits(np.ascontiguousarray(x).view(np.uint8), bitorder="little").reshape(-1, 32)
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32).reshape(x.shape)


def trailing_zeros(x: Array) -> Array:
    """The number of the lowest bit that is set; all ones where none is."""
    size = 8 * x.itemsize
    bits = (x[..., None] >> np.arange(size, dtype=x.dtype)) & x.dtype.type(1)
    return np.where(bits.any(-1), bits.argmax(-1), 0xFFFFFFFF).astype(np.uint32)


def permuted_bytes(x: Array, y: Array, select: Array) -> Words:
    """Four of the eight bytes of two words. 0 to 3 are of the second; 12 is 0, more is 255; 8 to 11 are signs."""
    both = (x.astype(np.uint64) << np.uint64(32)) | y
    result = np.zeros(both.shape, np.uint32)
    for place in range(4):
        which = (select >> np.uint32(8 * place)) & np.uint32(0xFF)
        byte = (both >> (np.uint64(8) * np.minimum(which, np.uint32(7)))) & np.uint64(0xFF)
        sign = np.where((both >> (np.uint64(16) * (which & np.uint32(3)) + np.uint64(15))) & np.uint64(1), 0xFF, 0)
        byte = np.where(which > 12, 0xFF, np.where(which == 12, 0, np.where(which >= 8, sign, byte)))
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def aligned_bits(high: Array, low: Array, shift: Array) -> Words:
    """The lower word of two words that are shifted right together."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (both >> (shift & 31).astype(np.uint64)).astype(np.uint32)


def byte_as_float(number: int, x: Array) -> Array:
    """One byte of each word, as a number >= 0."""
    return ((x >> np.uint32(8 * number)) & np.uint32(0xFF)).astype(np.float32)


def bitwise(table: int) -> Function:
    """Any function of three bits; bit 4x + 2y + z of the table is its value."""

    def compute(x: Array, y: Array, z: Array) -> Array:
        result = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
        for number in range(8):
            if table >> number & 1:
                result |= (x if number & 4 else ~x) & (y if number & 2 else ~y) & (z if number & 1 else ~z)
        return result

    return compute


def fixed_quotient(quotient: Array, divisor: Array, dividend: Array) -> Array:
    """The quotient with its sign, and the answers for zeros, infinities and NaN."""
    quotient, divisor, dividend = np.broadcast_arrays(quotient, divisor, dividend)
    one = np.where(np.signbit(divisor) ^ np.signbit(dividend), np.float32(-1), np.float32(1))
    value = np.where((divisor == 0) | np.isinf(dividend), one * np.float32(np.inf), one * np.abs(quotient))
    value = np.where(np.isinf(divisor) | (dividend == 0), one * np.float32(0), value)
    undefined = ((divisor == 0) & (dividend == 0)) | (np.isinf(divisor) & np.isinf(dividend))
    return np.where(undefined | _unordered(divisor, dividend), np.float32(np.nan), value)


def scaled_for_division(x: Array, divisor: Array, dividend: Array) -> tuple[Array, Array]:
    """A divisor or dividend, times 2**64 or 2**-64 where a quotient would leave the normal numbers; (x, flag)."""
    x, divisor, dividend = (np.ascontiguousarray(part) for part in np.broadcast_arrays(x, divisor, dividend))
    up, down = np.ldexp(x, 64), np.ldexp(x, -64)
    is_divisor, is_dividend = (
        x.view(np.uint32) == divisor.view(np.uint32),
        x.view(np.uint32) == dividend.view(np.uint32),
    )
    of_divisor, of_dividend = exponent_bits(divisor), exponent_bits(dividend)
    tiny_inverse = (np.abs(1 / divisor.astype(np.float64)) < SMALLEST) & (divisor != 0)
    tiny_quotient = (np.abs(dividend.astype(np.float64) / divisor) < SMALLEST) & (dividend != 0)
    cases = (
        ((divisor == 0) | (dividend == 0), np.full_like(x, np.nan), False),
        (of_dividend - of_divisor >= 96, np.where(is_divisor, up, x), True),
        (of_divisor == 0, up, False),
        (tiny_inverse & tiny_quotient, np.where(is_divisor, up, x), True),
        (tiny_inverse, down, False),
        (tiny_quotient, np.where(is_dividend, up, x), True),
        (of_dividend <= 23, up, False),
    )
    conditions = [case[0] for case in cases]
    value = np.select(conditions, [case[1] for case in cases], x)
    return value, np.select(conditions, [np.full(x.shape, case[2]) for case in cases], False)
