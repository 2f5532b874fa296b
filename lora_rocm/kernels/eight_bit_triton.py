"""Triton kernels around products of 8-bit matrices: codes and scales of rows, and scaled sums. See ``eight_bit``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS, PARTS = 2048, 8, 16
SUMS, SUM_WARPS, SUM_PARTS = 1024, 4, 4
"""Numbers of a block, warps, and parts of a rotated group. A block that is rotated has one warp: its threads exchange
numbers without memory and barriers. On an H200 this takes 65 to 80 % of the time of several warps.
"""
TILE = 32
LAUNCH = {"enable_fp_fusion": False}
"""Options for launching a kernel. Each operation is rounded by itself, so that the bits equal plain PyTorch's."""


@triton.jit
def _e4m3_code(value):
    """Return the code of the nearest e4m3 number, ties to even; for magnitudes up to 448. Zeros have no sign."""
    bits = value.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    # from 2**-6 on: round the mantissa to 3 bits, and change the exponent's bias from 127 to 7
    normal = (size_bits + (((7 - 127) << 23) + 0x7FFFF) + ((size_bits >> 20) & 1)) >> 20
    # below: steps of 2**-9, which are the last bits of numbers around 2**14
    small = (size_bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size_bits < 0x3C800000, small, normal)
    return tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))


@triton.jit
def _int8_code(value):
    """Return the nearest integer, ties to even; for magnitudes up to 2**21."""
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _four(value, APART: tl.constexpr):
    """Return the numbers of each four that are ``APART`` apart, subtracted from half of their sum."""
    fours = tl.reshape(value, [value.numel // (4 * APART), 2, 2, APART])
    halves = tl.sum(tl.sum(fours, axis=2), axis=1) * 0.5
    return tl.reshape(halves[:, None, None, :] - fours, value.shape)


@triton.jit
def _rotated(value, GROUP: tl.constexpr, HIGH: tl.constexpr):
    """Rotate each ``GROUP`` numbers of a block [HIGH, N, 4] (``_columns``) as ``rotation.rotated``; 0 rotates nothing.

    Bits equal plain PyTorch's, because each sum has two terms.
    """
    found = value
    for stage in tl.static_range(4):
        if 4**stage < GROUP:
            if 4**stage * HIGH < GROUP:
                found = _four(found, 4**stage)
            else:
                found = _four(found, value.numel // GROUP * 4**stage)
    return found


@triton.jit
def _columns(GROUP: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr):
    """Return the columns of a block of numbers [HIGH, N, 4].

    A group's numbers are split into ``HIGH`` parts, and the parts of all groups are the rows of the block. So Triton
    3.9 gives a thread the same place of all parts, which it rotates without other threads. Triton 3.6 does not.
    """
    part, word = tl.arange(0, HIGH)[:, None, None], tl.arange(0, BLOCK // HIGH // 4)[None, :, None]
    low = word * 4 + tl.arange(0, 4)[None, None, :]
    if HIGH == 1:
        return low + part
    width: tl.constexpr = GROUP // HIGH
    return (low // width) * GROUP + part * width + low % width


@triton.jit
def _scaled_values(x, factor, at, column, inside, FACTOR: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr):
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        value = value * tl.load(factor + column, mask=inside, other=0.0)
    return _rotated(value, GROUP, HIGH)


@triton.jit
def _words(value, byte, FP8: tl.constexpr):
    """Return the codes of numbers [HIGH, N, 4] as words [HIGH, N]."""
    if FP8:
        code = _e4m3_code(value)
    else:
        code = _int8_code(value)
    return tl.sum((code & 0xFF) << (8 * byte), axis=2)


@triton.jit
def scale_rows(
    x, factor, words, scale, stride, width, largest, tiny,
    FP8: tl.constexpr, FACTOR: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Write a row's codes, four in a word, and its scale; one program per row. ``width`` is a multiple of 4.

    It is a multiple of ``GROUP`` too, in which numbers are rotated first; 0 rotates nothing.
    The largest magnitude gets the code of ``largest``. Magnitudes are compared as integers: NaN is then the
    largest, and the scale of its row is NaN.

    ``WHOLE``: a block has room for the row, so that it is read and rotated once. Otherwise it is read again for codes.
    """
    row = tl.program_id(0).to(tl.int64)
    column, byte = _columns(GROUP, HIGH, BLOCK), tl.arange(0, 4)[None, None, :]
    word = tl.min(column, axis=2) // 4
    first = _scaled_values(x, factor, row * stride + column, column, column < width, FACTOR, GROUP, HIGH)
    peaks = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not WHOLE:
        for begin in range(BLOCK, width, BLOCK):
            at = begin + column
            value = _scaled_values(x, factor, row * stride + at, at, at < width, FACTOR, GROUP, HIGH)
            size_bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            peaks = tl.where(size_bits > peaks, size_bits, peaks)
    peak_bits = tl.max(tl.max(tl.max(peaks, axis=2), axis=0), axis=0)
    tiny_bits = tiny.to(tl.float32).to(tl.int32, bitcast=True)
    peak = tl.where(peak_bits > tiny_bits, peak_bits, tiny_bits).to(tl.float32, bitcast=True)
    tl.store(scale + row, tl.math.div_rn(peak, largest.to(tl.float32)))
    inverse = tl.math.div_rn(largest.to(tl.float32), peak)
    row_words = words + row * (width // 4)
    if WHOLE:
        tl.store(row_words + word, _words(first * inverse, byte, FP8), mask=word * 4 < width)
    else:
        for begin in range(0, width, BLOCK):
            at = begin + column
            value = _scaled_values(x, factor, row * stride + at, at, at < width, FACTOR, GROUP, HIGH) * inverse
            tl.store(row_words + begin // 4 + word, _words(value, byte, FP8), mask=begin + word * 4 < width)


@triton.jit
def turn_codes(words, turned, row_groups, row_words, TILE: tl.constexpr):
    """Write the transposed matrix of codes; one program per tile. Words have four codes of a row, as read and written.

    ``row_groups``: a quarter of the number of rows. ``row_words``: words of a row.
    """
    group = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    word = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (group < row_groups)[:, None] & (word < row_words)[None, :]
    at = (group * 4)[:, None] * row_words + word[None, :]
    first = tl.load(words + at, mask=inside, other=0)
    second = tl.load(words + at + row_words, mask=inside, other=0)
    third = tl.load(words + at + 2 * row_words, mask=inside, other=0)
    fourth = tl.load(words + at + 3 * row_words, mask=inside, other=0)
    for byte in tl.static_range(4):
        low = ((first >> (8 * byte)) & 0xFF) | (((second >> (8 * byte)) & 0xFF) << 8)
        high = ((third >> (8 * byte)) & 0xFF) | (((fourth >> (8 * byte)) & 0xFF) << 8)
        to = (word * 4 + byte)[:, None] * row_groups + group[None, :]
        tl.store(turned + to, tl.trans(low | (high << 16)), mask=tl.trans(inside))


@triton.jit
def scale_sums(
    sums, scale, factor, bias, out, width,
    FACTOR: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write int32 sums times the scales of their row and column, rotated, plus a bias; one program per block of a row.

    ``width`` is a multiple of ``GROUP``; 0 rotates nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + _columns(GROUP, HIGH, BLOCK)
    inside = column < width
    value = tl.load(sums + row * width + column, mask=inside, other=0).to(tl.float32) * tl.load(scale + row)
    if FACTOR:
        value = value * tl.load(factor + column, mask=inside, other=0.0)
    value = _rotated(value, GROUP, HIGH)
    if BIAS:
        value = value + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def _parts(group: int, most: int) -> int:
    """Return the number of parts of a group. A part has at least 16 numbers, so that memory is read in whole pieces."""
    return min(most, max(group // 16, 1))


def _row_warps(group: int, width: int) -> int:
    """Return the warps of a row. Long rows in groups of 64 take two: Triton 3.6 spills numbers of one on gfx1100."""
    if not group:
        return WARPS
    return 2 if group == 64 and width > BLOCK else 1


def launch_rows(
    x_MN: Tensor,
    factor_N: Tensor | None,
    codes_MN: Tensor,
    scale_M1: Tensor,
    largest: float,
    tiny: float,
    group: int,
) -> None:
    """Write the codes (int8) and scales of rows. Numbers of ``x_MN`` are multiplied by ``factor_N`` if it is given.

    ``largest``: largest storable number; 127 means int8, and any other number fp8. ``group``: see ``scale_rows``.
    """
    width = x_MN.shape[1]
    scale_rows[(len(x_MN),)](
        x_MN, x_MN if factor_N is None else factor_N, codes_MN.view(torch.int32), scale_M1,
        x_MN.stride(0), width, largest, tiny,
        FP8=largest != 127, FACTOR=factor_N is not None, GROUP=group, HIGH=_parts(group, PARTS), BLOCK=BLOCK,
        WHOLE=width <= BLOCK, num_warps=_row_warps(group, width), **LAUNCH,
    )  # fmt: skip


def launch_turn(codes_NK: Tensor, turned_KN: Tensor) -> None:
    """Write the transposed codes (int8). Both sizes are multiples of 4."""
    groups, words = codes_NK.shape[0] // 4, codes_NK.shape[1] // 4
    grid = triton.cdiv(groups, TILE), triton.cdiv(words, TILE)
    turn_codes[grid](codes_NK.view(torch.int32), turned_KN.view(torch.int32), groups, words, TILE=TILE, **LAUNCH)


def launch_sums(
    sums_MN: Tensor, scale_M1: Tensor, factor_N1: Tensor | None, bias_N: Tensor | None, out_MN: Tensor, group: int
) -> None:
    """Write the scaled sums of integer products; see ``eight_bit.scaled_sums``."""
    rows, width = sums_MN.shape
    scale_sums[(rows, triton.cdiv(width, SUMS))](
        sums_MN, scale_M1, scale_M1 if factor_N1 is None else factor_N1, scale_M1 if bias_N is None else bias_N, out_MN,
        width, FACTOR=factor_N1 is not None, BIAS=bias_N is not None, GROUP=group,
        HIGH=_parts(group, SUM_PARTS), BLOCK=SUMS, num_warps=1 if group else SUM_WARPS, **LAUNCH,
    )  # fmt: skip
