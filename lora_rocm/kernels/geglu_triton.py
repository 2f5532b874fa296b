"""GEGLU with one kernel forward and one backward; each number is read and written once. See ``geglu``."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.backend import LAUNCH

BLOCK = 1024


@triton.jit
def geglu_forward(ag, out, width, BLOCK: tl.constexpr):
    """The output; one program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(ag + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(ag + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    gelu = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    tl.store(out + row * width + column, (a * gelu).to(out.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward(dy, ag, width, BLOCK: tl.constexpr):
    """Overwrite a and g with their gradients; one program per block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(ag + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(ag + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
    pdf = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    element = ag.dtype.element_ty
    tl.store(ag + row * 2 * width + column, (d * g * cdf).to(element), mask=inside)
    tl.store(ag + row * 2 * width + width + column, (d * a * (cdf + g * pdf)).to(element), mask=inside)


class TritonGeglu(Function):
    """As ``geglu``'s eager form."""

    @staticmethod
    def forward(ctx: Any, ag: Tensor) -> Tensor:
        ag = ag.contiguous()
        width = ag.shape[-1] // 2
        out = ag.new_empty(*ag.shape[:-1], width)
        geglu_forward[_grid(out)](ag, out, width, BLOCK=BLOCK, **LAUNCH)
        ctx.save_for_backward(ag)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        ag: Tensor
        (ag,) = ctx.saved_tensors
        dy = dy.contiguous()
        geglu_backward[_grid(dy)](dy, ag, dy.shape[-1], BLOCK=BLOCK, **LAUNCH)
        return ag


def _grid(out: Tensor) -> tuple[int, int]:
    return out.numel() // out.shape[-1], triton.cdiv(out.shape[-1], BLOCK)
