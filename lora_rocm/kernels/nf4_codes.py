"""The codes of nf4: each value's nearest level, in units of the largest magnitude of its block.

Up to a dozen threads pack weights, and another one starts the run. Only one thread at a time runs Python, so the fewer
operations per value, the less the threads wait for each other. Buffers are reused, because on the CPU allocating memory
for each piece takes longer than the arithmetic.

Dimensions: R rows, C columns, N values, K blocks of 64 (B), P pairs of values.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 64
CELLS = 1 << 15  # positive or negative numbers that differ in the upper 16 bits of their float32
PIECE = 1 << 21  # values that are quantised at once: few enough for the CPU's cache, and enough that threads seldom
# wait for each other, since only one at a time runs Python
TINY = 1e-12  # scale of a row of zeros
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The levels of nf4: quantiles of the normal distribution (arXiv 2305.14314, appendix E)."""
BITS = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}
"""By bytes of a floating-point number: the integer of its size, and the bits of its magnitude. Magnitudes have the
order of these integers."""
MANTISSA = 0x7F  # its bits in bf16
FAR = 1 << 11  # of a bf16 number, in steps below the largest with the exponent of its block: 16 powers of two


def pieces_of(weight_RC: Tensor) -> list[slice]:
    """Return slices that split the rows. Each has about ``PIECE`` values; on the meta device there is only one."""
    count, size = weight_RC.shape
    step = count if weight_RC.is_meta else max(1, PIECE // size)
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, max(step, 1))]


def largest_of_rows(weight_RC: Tensor) -> Tensor:
    """Return the largest magnitude of each row: float32 [R]."""
    whole, magnitude = BITS[weight_RC.element_size()]
    bits_RC, pieces = weight_RC.view(whole), pieces_of(weight_RC)
    largest_R = torch.empty(len(bits_RC), dtype=whole, device=weight_RC.device)
    sizes_RC = torch.empty_like(bits_RC[pieces[0]])
    for rows in pieces:
        sizes = torch.bitwise_and(bits_RC[rows], magnitude, out=sizes_RC[: rows.stop - rows.start])
        torch.amax(sizes, dim=1, out=largest_R[rows])
    return largest_R.view(weight_RC.dtype).float()


def pairs_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the nearest levels, two per byte (uint8), and each block's largest magnitude (float32)."""
    weight_KB = weight.contiguous().view(-1, BLOCK)
    absmax_K = largest_of_rows(weight_KB)
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return _by_division(weight_KB, absmax_K).view(-1), absmax_K
    pairs_KP = _from_table(weight_KB, absmax_K)
    small_K = absmax_K < TINY  # divided by ``TINY``, which the table does not know
    if small_K.any():
        pairs_KP[small_K] = _by_division(weight_KB[small_K], absmax_K[small_K])
    return pairs_KP.view(-1), absmax_K


def _by_division(weight_KB: Tensor, absmax_K: Tensor) -> Tensor:
    """Return the pairs of codes of each block, computed by a division for each value: uint8 [K, P]."""
    pairs_KP = torch.empty(len(weight_KB), BLOCK // 2, dtype=torch.uint8, device=weight_KB.device)
    pieces = pieces_of(weight_KB)
    scaled_RB = torch.empty_like(weight_KB[pieces[0]], dtype=torch.float32)
    nearest = NearestLevels(LEVELS, scaled_RB.numel(), weight_KB.device)
    for blocks in pieces:
        scaled = scaled_RB[: blocks.stop - blocks.start].copy_(weight_KB[blocks])
        scaled.div_(absmax_K[blocks].clamp(min=TINY)[:, None])
        _write_pairs(nearest(scaled.view(-1)), pairs_KP[blocks])
    return pairs_KP


def _from_table(weight_KB: Tensor, absmax_K: Tensor) -> Tensor:
    """Return the same codes as ``_by_division``, of bf16 and in less than half of the time: ``_table`` has all of them.

    The index of a value is the difference of two integers. One depends on its block, the other is its bits: a
    negative number is 32,768 below the number of its magnitude.
    """
    pairs_KP = torch.empty(len(weight_KB), BLOCK // 2, dtype=torch.uint8)
    largest_K = absmax_K.bfloat16().view(torch.int16).int()
    mantissa_K, highest_K = largest_K & MANTISSA, largest_K | MANTISSA
    base_K1 = ((mantissa_K << 16) + highest_K)[:, None]
    bits_KB, pieces, table = weight_KB.view(torch.int16), pieces_of(weight_KB), _table()
    index_RB = torch.empty_like(bits_KB[pieces[0]], dtype=torch.int32)
    codes_N = torch.empty(index_RB.numel(), dtype=torch.uint8)
    for blocks in pieces:
        index = index_RB[: blocks.stop - blocks.start].copy_(bits_KB[blocks])
        torch.sub(base_K1[blocks], index, out=index)
        codes = torch.index_select(table, 0, index.view(-1), out=codes_N[: index.numel()])
        _write_pairs(codes, pairs_KP[blocks])
    return pairs_KP


@cache
def _table() -> Tensor:
    """Return the codes of all bf16 numbers in a block, by the mantissa of the block's largest magnitude: uint8 [N].

    For each mantissa, 32,768 positive numbers and as many negative ones, beginning with the largest magnitude of the
    same exponent. Of numbers that are ``FAR`` steps below it, the nearest level is 0.
    """
    highest = torch.tensor(1.0, dtype=torch.bfloat16).view(torch.int16) | MANTISSA  # of the numbers from 1 to 2
    absmax_M = (highest - torch.arange(MANTISSA, -1, -1, dtype=torch.int16)).view(torch.bfloat16).float()
    near_N = (highest - torch.arange(FAR, dtype=torch.int16)).view(torch.bfloat16).float()
    scaled_M2N = (near_N / absmax_M[:, None])[:, None] * torch.tensor([1.0, -1.0])[:, None]
    nearest = NearestLevels(LEVELS, scaled_M2N.numel(), scaled_M2N.device)
    codes_M2N = torch.full((len(absmax_M), 2, 1 << 15), LEVELS.index(0.0), dtype=torch.uint8)
    codes_M2N[:, :, :FAR] = nearest(scaled_M2N.reshape(-1)).view(scaled_M2N.shape)
    return codes_M2N.view(-1)


def _write_pairs(codes_N: Tensor, pairs_KP: Tensor) -> None:
    """Write each two codes as one byte, the first in its upper half. It changes ``codes_N``.

    Two codes a and b are the integer a + 256 b. Times 4097, its upper byte is 16 a + b.
    """
    pairs_KP.view(-1).copy_(codes_N.view(torch.int16).mul_(4097).bitwise_right_shift_(8))


class NearestLevels:
    """Finds the nearest of sorted levels for each number, in a fraction of ``torch.bucketize``'s time.

    Numbers with the same upper 16 bits, a cell, have at most one limit between two levels among them. A table has this
    limit for each cell, and the number of limits below the cell. Of two levels at the same distance, the lower one is
    the nearest.

    Args:
        levels: in ascending order, at most 256.
        count: maximum number of values per call.
    """

    def __init__(self, levels: tuple[float, ...], count: int, device: torch.device) -> None:
        self._limit_C, self._below_C = (table.to(device) for table in _cells(levels))
        self._limit_N = torch.empty(count, device=device)
        self._cell_N, self._level_N, self._above_N = (
            torch.empty(count, dtype=dtype, device=device) for dtype in (torch.int32, torch.uint8, torch.bool)
        )

    def __call__(self, numbers_N: Tensor) -> Tensor:
        """Return the index of the nearest level for each float32 number: uint8 [N], valid until the next call."""
        limit_N, cell_N, level_N, above_N = (
            buffer[: len(numbers_N)] for buffer in (self._limit_N, self._cell_N, self._level_N, self._above_N)
        )
        torch.bitwise_right_shift(numbers_N.view(torch.int32), 16, out=cell_N).add_(CELLS)
        torch.index_select(self._limit_C, 0, cell_N, out=limit_N)
        torch.gt(numbers_N, limit_N, out=above_N)
        torch.index_select(self._below_C, 0, cell_N, out=level_N)
        return level_N.add_(above_N)


@cache
def _cells(levels: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return the limit within each cell (infinity if it has none), and the number of limits below the cell."""
    levels_L = torch.tensor(levels)
    limits = (levels_L[:-1] + levels_L[1:]) / 2
    first_C = torch.arange(-CELLS, CELLS, dtype=torch.int32) << 16
    ends_2C = torch.stack([first_C, first_C | 0xFFFF]).view(torch.float32)
    ends_2C[1] = torch.where(ends_2C[1].isnan(), ends_2C[0], ends_2C[1])  # infinity, in a cell with NaN
    below_C, above_C = torch.bucketize(ends_2C, limits).sort(dim=0).values
    assert (above_C - below_C).amax() <= 1, "a cell has several limits"
    within_C = torch.where(above_C > below_C, below_C, len(limits))
    limit_C = torch.cat([limits, limits.new_tensor([torch.inf])]).index_select(0, within_C)
    return limit_C, below_C.to(torch.uint8)
