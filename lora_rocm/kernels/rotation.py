"""Rotation of the inputs of a layer in groups, which spreads a large input over its group (ConvRot, arXiv 2512.03673).

A group's matrix is the Kronecker product of H = J / 2 - I, of 4 numbers (J has only ones). H is a regular Hadamard
matrix divided by 2: symmetric, orthogonal, and all its rows have the same sum. So the rotation is its own inverse, and
inputs that are all equal stay as they are; Sylvester's matrix would add them up to one large number.

ConvRot's matrix is the product of H with its columns reversed. Its numbers of a group are these in reverse order.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

GROUPS = (256, 64, 16)
"""Numbers of inputs that are rotated together. They are powers of 4; 256 is the number of ConvRot's published files."""
PIECE = 1 << 17
"""Values that a CPU rotates at once: few enough for the cache of a core."""


def group_of(inputs: int) -> int:
    """Return the largest group for a number of inputs, or 0 if there is none."""
    return next((group for group in GROUPS if inputs % group == 0), 0)


def rotated(x: Tensor, group: int) -> Tensor:
    """Return the rotated rows in float32. With ``group`` 0 nothing is rotated.

    Sums are (a + b) + (c + d), as in the kernels, so that both give the same bits.

    Args:
        x: numbers [..., N].
        group: 0, or one of ``GROUPS`` that divides N.
    """
    if not group:
        return x.float()
    groups_KG = x.reshape(-1, group)
    found_KG = torch.empty_like(groups_KG, dtype=torch.float32, memory_format=torch.contiguous_format)
    count = PIECE // group if x.device.type == "cpu" else max(1, len(groups_KG))
    for found, given in zip(found_KG.split(count), groups_KG.split(count), strict=True):
        found.copy_(_rotated_columns(given.t().to(torch.float32, memory_format=torch.contiguous_format, copy=True)).t())
    return found_KG.view(x.shape)


def _rotated_columns(x_GK: Tensor) -> Tensor:
    """Rotate columns in place, and return them. Rows that are added are contiguous memory, unlike in rotated rows."""
    group, apart = len(x_GK), 1
    while apart < group:
        fours = x_GK.view(-1, 4, apart * x_GK.shape[1])
        halves = fours[:, 0] + fours[:, 1]
        halves.add_(fours[:, 2] + fours[:, 3]).mul_(0.5)
        torch.sub(halves[:, None], fours, out=fours)
        apart *= 4
    return x_GK


def rotated_few(x: Tensor, group: int) -> Tensor:
    """Return few rotated rows in their dtype, by one product with the matrix; with ``group`` 0, ``x`` itself.

    A GPU needs less time for one launch than for the sums of ``rotated``. The matrix is exact in every dtype.
    """
    return x if not group else (x.reshape(-1, group) @ _matrix(group, x.dtype, x.device)).view(x.shape)


@cache
def _matrix(group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return rotated(torch.eye(group), group).to(device, dtype)
