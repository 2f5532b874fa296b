"""MXFP4 weights: each value is one of 16 numbers, times a power of two that 32 values share. A byte holds two values.

Source: OCP Microscaling Formats 1.0 (E2M1 numbers, E8M0 scales). The layout follows gpt-oss: the first value of a pair
is in the lower half of its byte. Dimensions: G groups of 32 values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lora_rocm.device.constants import constant

GROUP = 32
BYTES = GROUP // 2
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WORDS = {2: torch.int32, 4: torch.int64}
"""Integer dtype that is twice as wide, keyed by the size of a dtype in bytes."""
LARGEST_SCALE = 127 + 13
"""Largest scale with which all values fit into float16, that is, below 65,504. Scale 255 means NaN."""
SUBNORMAL = 0x00400000
"""Bits of 2**-127 as float32: the factor that scale 0 stands for."""


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of packed tensors: [..., 32 G]. They are exact in float32 and bfloat16.

    Args:
        blocks: packed values, uint8 [..., G, 16].
        scales: exponents of two, plus 127, uint8 [..., G].
        dtype: dtype of the result.
    """
    values = _pairs(dtype, blocks.device).index_select(0, blocks.flatten().int()).view(dtype)
    exponents = scales.int()
    factors = torch.where(exponents == 0, SUBNORMAL, exponents << 23).view(torch.float32).to(dtype)
    return values.view(*scales.shape, GROUP).mul_(factors[..., None]).flatten(-2)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a table [256] with the two values of each byte, stored as one integer.

    Indexing single integers is faster than indexing rows of two values.
    """
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=dtype)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    return constant(pairs.view(WORDS[dtype.itemsize]).flatten().to(device), "table of MXFP4")


def product(x: Tensor, dense: Callable[[torch.dtype], Tensor], bias_O: Tensor) -> Tensor:
    """Return ``linear`` of ``x`` with a frozen weight that exists only while it is used.

    Args:
        x: input [..., I].
        dense: returns the weight [O, I] in a dtype. It is called in the forward pass and again in the backward pass.
        bias_O: bias in any dtype.
    """
    output: Tensor = _Product.apply(x, dense, bias_O)
    return output


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dense: Callable[[torch.dtype], Tensor], bias_O: Tensor) -> Tensor:
        ctx.dense = dense
        return linear(x, dense(x.dtype), bias_O.to(x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy @ ctx.dense(dy.dtype), None, None
