"""A residual sum and the following LayerNorm as one kernel forward and one backward. See ``norms``.

A row fits into registers, so the backward kernel recomputes mean and deviation, and only the sum is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.backend import LAUNCH


@triton.jit
def _normal_row(value, inside, width, eps):
    mean = tl.sum(value, axis=0) / width
    away = tl.where(inside, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(away * away, axis=0) / width + eps)
    return away * rstd, rstd


@triton.jit
def layer_norm_forward(x, delta, weight, bias, total, y, width, eps, DELTA: tl.constexpr, BLOCK: tl.constexpr):
    """Sum and norm; one program per row."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        value += tl.load(delta + start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + start + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    normal, rstd = _normal_row(value, inside, width, eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + column, (normal * w + b).to(y.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward(dy, residual, total, weight, dx, width, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of the sum, plus that of a residual path; one program per row."""
    start = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(total + start + column, mask=inside, other=0.0).to(tl.float32)
    normal, rstd = _normal_row(value, inside, width, eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + start + column, mask=inside, other=0.0).to(tl.float32) * w
    plain = tl.sum(gradient, axis=0) / width
    along = tl.sum(gradient * normal, axis=0) / width
    result = (gradient - plain - normal * along) * rstd
    if RESIDUAL:
        result += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + start + column, result.to(dx.dtype.element_ty), mask=inside)


class TritonAddLayerNorm(Function):
    """(x, delta or None, weight, bias, eps) -> (sum, normalised). See ``norms.add_layer_norm``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        flat = x.contiguous()
        delta = None if delta is None else delta.contiguous()
        total = flat if delta is None else torch.empty_like(flat)
        y = torch.empty_like(flat)
        width = x.shape[-1]
        layer_norm_forward[(x.numel() // width,)](
            flat, delta, weight, bias, total, y, width, eps, DELTA=delta is not None, BLOCK=_block(width), **LAUNCH
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.has_delta = eps, delta is not None
        return (x if delta is None else total), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return residual, residual if ctx.has_delta else None, None, None, None
        total, weight = ctx.saved_tensors
        dy = dy.contiguous()
        residual = None if residual is None else residual.contiguous()
        dx, width = torch.empty_like(total), total.shape[-1]
        layer_norm_backward[(total.numel() // width,)](
            dy,
            residual,
            total,
            weight,
            dx,
            width,
            ctx.eps,
            RESIDUAL=residual is not None,
            BLOCK=_block(width),
            **LAUNCH,
        )
        return dx, dx if ctx.has_delta else None, None, None, None


def _block(width: int) -> int:
    return int(triton.next_power_of_2(width))
