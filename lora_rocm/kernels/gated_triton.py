"""Triton kernels for activations, with and without a gate: one forward and one backward, each reading its data once.

See ``gated``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.backend import LAUNCH

BLOCK = 1024
# A slope, from -0.13 to 1.13, as a byte: in steps of 1/200, so that 0 and 1 are exact.
SLOPE_STEPS, SLOPE_ZERO = tl.constexpr(200.0), tl.constexpr(27.0)


@triton.jit
def _block_of_row(stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row * stride + column, row * width + column, column < width


@triton.jit
def _tanh_share(gate):
    """Return sigmoid(2u) and the derivative of 2u. The gelu with tanh(u) is gate * sigmoid(2u)."""
    share = tl.sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate))
    return share, 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)


@triton.jit
def _share_and_slope(gate, GELU: tl.constexpr, TANH: tl.constexpr):
    """Return activation(gate) / gate, and the derivative of the activation."""
    if TANH:
        share, inner = _tanh_share(gate)
        slope = share + gate * share * (1.0 - share) * inner
    elif GELU:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        slope = share + gate * 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
    else:
        share = tl.sigmoid(gate)
        slope = share + gate * share * (1.0 - share)
    return share, slope


@triton.jit
def gated_forward(a, g, out, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr = False):
    """Write a * activation(g); one program per block of a row. ``stride``: row stride of a and g."""
    at, to, inside = _block_of_row(stride, width, BLOCK)
    value = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    share = _share_and_slope(gate, GELU, TANH)[0]
    tl.store(out + to, (value * gate * share).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(dy, a, g, stride, width, GELU: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr = False):
    """Overwrite a and g with their gradients; one program per block of a row. ``stride``: row stride of a and g."""
    at, source, inside = _block_of_row(stride, width, BLOCK)
    value = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + source, mask=inside, other=0.0).to(tl.float32)
    share, slope = _share_and_slope(gate, GELU, TANH)
    tl.store(a + at, (gradient * gate * share).to(a.dtype.element_ty), mask=inside)
    tl.store(g + at, (gradient * value * slope).to(g.dtype.element_ty), mask=inside)


@triton.jit
def activated_forward(g, slopes, count, GELU: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr = False):
    """Overwrite g with activation(g), and write the slopes as bytes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(g + at, mask=at < count, other=0.0).to(tl.float32)
    share, slope = _share_and_slope(gate, GELU, TANH)
    tl.store(g + at, (gate * share).to(g.dtype.element_ty), mask=at < count)
    code = slope * SLOPE_STEPS + (SLOPE_ZERO + 0.5)  # rounded down by the conversion
    tl.store(slopes + at, code.to(tl.int32).to(tl.uint8), mask=at < count)


@triton.jit
def activated_backward(dy, slopes, count, BLOCK: tl.constexpr):
    """Overwrite dy, the gradient of the output, with the gradient of the input."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slope = (tl.load(slopes + at, mask=at < count, other=0).to(tl.float32) - SLOPE_ZERO) / SLOPE_STEPS
    gradient = tl.load(dy + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(dy + at, (gradient * slope).to(dy.dtype.element_ty), mask=at < count)


def launch_activated(g: Tensor, slopes: Tensor, activation: str) -> None:
    """Overwrite g with activation(g), and write its slopes (uint8).

    Both tensors are contiguous and have the same shape.
    """
    grid = (triton.cdiv(g.numel(), BLOCK),)
    activated_forward[grid](g, slopes, g.numel(), **_how(activation), BLOCK=BLOCK, **LAUNCH)


def launch_slopes(dy: Tensor, slopes: Tensor) -> None:
    """Multiply dy by the slopes, in place. Both tensors are contiguous and have the same shape."""
    activated_backward[(triton.cdiv(dy.numel(), BLOCK),)](dy, slopes, dy.numel(), BLOCK=BLOCK, **LAUNCH)


class TritonGated(Function):
    """Autograd function (activation, a, g or None) -> output: the Triton implementation of ``gated.gated``."""

    @staticmethod
    def forward(ctx: Any, activation: str, *given: Tensor | None) -> Tensor:
        ctx.shapes = [None if tensor is None else tensor.shape for tensor in given]
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in given if tensor is not None]
        if rows[0].stride() != rows[-1].stride() or rows[0].stride(1) != 1:
            rows = [tensor.contiguous() for tensor in rows]
        out_MN = rows[0].new_empty(len(rows[0]), rows[0].shape[1] * len(rows) // 2)
        ctx.activation = activation
        ctx.save_for_backward(*rows)
        a, g = _pair(rows)
        _launch(gated_forward, out_MN, (a, g, out_MN), a.stride(0), activation)
        return out_MN.view(*ctx.shapes[0][:-1], out_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, dy = ctx.saved_tensors, dy.contiguous()
        a, g = _pair(rows)
        _launch(gated_backward, dy, (dy, a, g), a.stride(0), ctx.activation)
        gradients = [tensor.view(shape) for tensor, shape in zip(rows, ctx.shapes, strict=False)]
        return None, *gradients, *[None] * (2 - len(gradients))


def _pair(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    return rows if len(rows) == 2 else rows[0].chunk(2, dim=1)


def _launch(kernel: Any, dense: Tensor, tensors: Sequence[Tensor], stride: int, activation: str) -> None:
    width = dense.shape[-1]
    grid = dense.numel() // width, triton.cdiv(width, BLOCK)
    kernel[grid](*tensors, stride, width, **_how(activation), BLOCK=BLOCK, **LAUNCH)


def _how(activation: str) -> dict[str, bool]:
    return {"GELU": activation == "gelu", **({"TANH": True} if activation == "gelu-tanh" else {})}
