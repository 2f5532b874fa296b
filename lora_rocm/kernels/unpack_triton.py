"""Triton kernels for the dense weight of a packed layer. Each number is read and written once. See ``quantised``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NF4_BLOCKS = 1024, 64
LAUNCH = {"enable_fp_fusion": False}
"""Options for launching a kernel. Multiply and add are rounded separately, so that the bits equal plain PyTorch's."""


@triton.jit
def _e4m3(code):
    """Convert fp8 codes to numbers, by way of float16, which has one more exponent bit and a bias larger by 8."""
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def unpack_rows(codes, scale, out, width, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Write int8 or fp8 numbers times the scale of their row; one program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    code = tl.load(codes + row * width + column, mask=inside, other=0).to(tl.int32)
    if FP8:
        value = _e4m3(code & 0xFF)
    else:
        value = code.to(tl.float32)
    dense = (value * tl.load(scale + row)).to(out.dtype.element_ty)
    tl.store(out + row * width + column, dense, mask=inside)


@triton.jit
def unpack_nf4(packed, table, nested_codes, code, nested, offset, out, blocks, BLOCKS: tl.constexpr):
    """Write the values of nf4 codes; one program per ``BLOCKS`` blocks of 64 values.

    Level n is the second number in entry n of the table.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    magnitude = tl.load(code + tl.load(nested_codes + block, mask=inside, other=0).to(tl.int32))
    magnitude = magnitude * tl.load(nested + (block >> 8), mask=inside, other=0.0) + tl.load(offset)
    byte = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    pair = tl.load(packed + byte, mask=inside[:, None], other=0).to(tl.int32)
    first = tl.load(table + (pair >> 4) * 2 + 1).to(tl.float32) * magnitude[:, None]
    second = tl.load(table + (pair & 15) * 2 + 1).to(tl.float32) * magnitude[:, None]
    dense = tl.interleave(first, second).to(out.dtype.element_ty)
    place = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + place, dense, mask=inside[:, None])


def launch_rows(codes_OI: Tensor, scale_O1: Tensor, out_OI: Tensor) -> None:
    """Write the dense weight of a ``ScaledRows`` layer. Codes are int8, or for fp8 uint8."""
    rows, width = out_OI.shape
    grid = rows, triton.cdiv(width, BLOCK)
    unpack_rows[grid](codes_OI, scale_O1, out_OI, width, FP8=not codes_OI.is_signed(), BLOCK=BLOCK, **LAUNCH)


def launch_nf4(
    pairs: Tensor, table: Tensor, nested_codes: Tensor, code: Tensor, nested: Tensor, offset: Tensor, out_OI: Tensor
) -> None:
    """Write the dense weight of an ``Nf4`` layer. The arguments are the layer's tensors."""
    blocks = out_OI.numel() // 64
    grid = (triton.cdiv(blocks, NF4_BLOCKS),)
    unpack_nf4[grid](pairs, table, nested_codes, code, nested, offset, out_OI, blocks, BLOCKS=NF4_BLOCKS, **LAUNCH)
