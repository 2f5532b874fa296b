"""GroupNorm with SiLU in channels_last: three kernels forward, three backward. See ``norms``.

A feature map is cut into chunks of pixels and blocks of channels. The first forward kernel computes the mean and the
sum of squared deviations of each channel per chunk. A small kernel combines them per group (Chan et al. 1979, which
avoids differences of large sums), and the third kernel normalises. The backward pass does the same with the two sums
that the gradient needs. Only ``x`` and each group's mean and reciprocal standard deviation are kept.
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

BLOCK = 64
SMALL_PIXELS, LARGE_PIXELS = 32, 128
MANY_BLOCKS = 1024  # enough to fill a GPU with large chunks
JOINED = 2048  # numbers that a combining program holds at once
WARPS = 8
"""Warps per program. With 4, the gradient of large images spills registers on wave-32 GPUs (Triton 3.6, 3.8 and 3.9),
and gfx942 runs no more waves than with 8. With 16, gfx1100 would run 10 waves instead of 7, each with half as many
numbers. These numbers were computed by benchmarks/registers.py, not measured.
"""


@triton.jit
def _tile(pixels, channels, chunks, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(0)
    batch = part // chunks
    pixel = (part % chunks) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    offset = (batch.to(tl.int64) * pixels + pixel)[:, None] * channels + channel[None, :]
    return part, batch, channel, inside, offset


@triton.jit
def moments(
    x, shift, means, spreads, pixels, channels, chunks, SHIFT: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the mean and the sum of squared deviations of each channel over a chunk of pixels."""
    part, batch, channel, inside, offset = _tile(pixels, channels, chunks, PIXELS, BLOCK)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    count = tl.minimum(PIXELS, pixels - (part % chunks) * PIXELS).to(tl.float32)
    mean = tl.sum(value, axis=0) / count
    away = tl.where(inside, value - mean[None, :], 0.0)
    spread = tl.sum(away * away, axis=0)
    if SHIFT:
        mean += tl.load(shift + batch * channels + channel, mask=channel < channels, other=0.0).to(tl.float32)
    tl.store(means + part * channels + channel, mean, mask=channel < channels)
    tl.store(spreads + part * channels + channel, spread, mask=channel < channels)


@triton.jit
def join_moments(
    means, spreads, mean_out, rstd_out, pixels, channels, chunks, groups, eps,
    PIXELS: tl.constexpr, ROUNDS: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the mean and reciprocal standard deviation of each group, combined from the chunks of its channels."""
    program = tl.program_id(0)
    width = channels // groups
    column = tl.arange(0, WIDTH)
    first = (program // groups) * chunks
    start = (program % groups) * width
    # The mean of the group: chunk means weighted by their pixels.
    total = tl.zeros([JOINED, WIDTH], tl.float32)
    for turn in range(ROUNDS):
        chunk = turn * JOINED + tl.arange(0, JOINED)
        inside = (chunk < chunks)[:, None] & (column < width)[None, :]
        count = tl.minimum(PIXELS, pixels - chunk * PIXELS).to(tl.float32)
        offset = (first + chunk)[:, None] * channels + (start + column)[None, :]
        total += tl.load(means + offset, mask=inside, other=0.0) * count[:, None]
    number = (pixels * width).to(tl.float32)
    mean = tl.sum(tl.sum(total, axis=1), axis=0) / number
    # The variance: deviations within chunks, and of the chunk means from the group's mean.
    spread = tl.zeros([JOINED, WIDTH], tl.float32)
    for turn in range(ROUNDS):
        chunk = turn * JOINED + tl.arange(0, JOINED)
        inside = (chunk < chunks)[:, None] & (column < width)[None, :]
        count = tl.minimum(PIXELS, pixels - chunk * PIXELS).to(tl.float32)
        offset = (first + chunk)[:, None] * channels + (start + column)[None, :]
        away = tl.load(means + offset, mask=inside, other=0.0) - mean
        inner = tl.load(spreads + offset, mask=inside, other=0.0)
        spread += tl.where(inside, inner + away * away * count[:, None], 0.0)
    variance = tl.sum(tl.sum(spread, axis=1), axis=0) / number
    tl.store(mean_out + program, mean)
    tl.store(rstd_out + program, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _normalised(
    x, shift, weight, bias, mean, rstd, batch, channel, inside, offset, channels, groups, SHIFT: tl.constexpr
):
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    is_channel = channel < channels
    group = batch * groups + channel // (channels // groups)
    centre = tl.load(mean + group, mask=is_channel, other=0.0)
    if SHIFT:
        centre -= tl.load(shift + batch * channels + channel, mask=is_channel, other=0.0).to(tl.float32)
    scale = tl.load(rstd + group, mask=is_channel, other=0.0)
    w = tl.load(weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    b = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    normal = (value - centre[None, :]) * scale[None, :]
    return normal, normal * w[None, :] + b[None, :], w, scale, group


@triton.jit
def normalise(
    x, shift, weight, bias, mean, rstd, y, pixels, channels, chunks, groups,
    SHIFT: tl.constexpr, SILU: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the normalised output, after SiLU if SILU is set."""
    part, batch, channel, inside, offset = _tile(pixels, channels, chunks, PIXELS, BLOCK)
    normal, z, w, scale, group = _normalised(
        x, shift, weight, bias, mean, rstd, batch, channel, inside, offset, channels, groups, SHIFT
    )
    if SILU:
        z = z * tl.sigmoid(z)
    tl.store(y + offset, z.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _normal_gradient(dy, z, w, inside, offset, SILU: tl.constexpr):
    gradient = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        s = tl.sigmoid(z)
        gradient = gradient * (s + z * s * (1.0 - s))
    return gradient * w[None, :]


@triton.jit
def gradient_sums(
    dy, x, shift, weight, bias, mean, rstd, plain_sums, normal_sums, pixels, channels, chunks, groups,
    SHIFT: tl.constexpr, SILU: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write two sums per channel and chunk, over the gradient of the normalised input.

    ``plain_sums`` are sums of this gradient, and ``normal_sums`` are sums of its product with the normalised input.
    """
    part, batch, channel, inside, offset = _tile(pixels, channels, chunks, PIXELS, BLOCK)
    normal, z, w, scale, group = _normalised(
        x, shift, weight, bias, mean, rstd, batch, channel, inside, offset, channels, groups, SHIFT
    )
    gradient = _normal_gradient(dy, z, w, inside, offset, SILU)
    at = part * channels + channel
    tl.store(plain_sums + at, tl.sum(gradient, axis=0), mask=channel < channels)
    tl.store(normal_sums + at, tl.sum(gradient * normal, axis=0), mask=channel < channels)


@triton.jit
def join_sums(
    plain_sums, normal_sums, plain_out, normal_out, pixels, channels, chunks, groups,
    ROUNDS: tl.constexpr, JOINED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the mean per group of each of the two sums of ``gradient_sums``."""
    program = tl.program_id(0)
    width = channels // groups
    column = tl.arange(0, WIDTH)
    first = (program // groups) * chunks
    start = (program % groups) * width
    plain = tl.zeros([JOINED, WIDTH], tl.float32)
    normal = tl.zeros([JOINED, WIDTH], tl.float32)
    for turn in range(ROUNDS):
        chunk = turn * JOINED + tl.arange(0, JOINED)
        inside = (chunk < chunks)[:, None] & (column < width)[None, :]
        offset = (first + chunk)[:, None] * channels + (start + column)[None, :]
        plain += tl.load(plain_sums + offset, mask=inside, other=0.0)
        normal += tl.load(normal_sums + offset, mask=inside, other=0.0)
    number = (pixels * width).to(tl.float32)
    tl.store(plain_out + program, tl.sum(tl.sum(plain, axis=1), axis=0) / number)
    tl.store(normal_out + program, tl.sum(tl.sum(normal, axis=1), axis=0) / number)


@triton.jit
def input_gradient(
    dy, residual, x, shift, weight, bias, mean, rstd, plain_mean, normal_mean, dx, pixels, channels, chunks, groups,
    SHIFT: tl.constexpr, SILU: tl.constexpr, RESIDUAL: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, plus the gradient of a residual path if RESIDUAL is set."""
    part, batch, channel, inside, offset = _tile(pixels, channels, chunks, PIXELS, BLOCK)
    normal, z, w, scale, group = _normalised(
        x, shift, weight, bias, mean, rstd, batch, channel, inside, offset, channels, groups, SHIFT
    )
    gradient = _normal_gradient(dy, z, w, inside, offset, SILU)
    is_channel = channel < channels
    plain = tl.load(plain_mean + group, mask=is_channel, other=0.0)
    along = tl.load(normal_mean + group, mask=is_channel, other=0.0)
    result = (gradient - plain[None, :] - normal * along[None, :]) * scale[None, :]
    if RESIDUAL:
        result += tl.load(residual + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + offset, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def add_bias_residual(x, y, bias, out, count, channels, BLOCK: tl.constexpr):
    """Write x + y + the bias of each channel."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    b = tl.load(bias + at % channels, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
    total += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


class _Shape:
    """Launch parameters for a batch of feature maps: pixels per chunk, channels per block, grids, and buffer shapes."""

    def __init__(self, x_BCHW: Tensor, groups: int) -> None:
        batch, channels, height, width = x_BCHW.shape
        pixels = height * width
        blocks = triton.cdiv(channels, BLOCK)
        many = batch * triton.cdiv(pixels, LARGE_PIXELS) * blocks >= MANY_BLOCKS
        self.cut = {
            "PIXELS": LARGE_PIXELS if many else SMALL_PIXELS,
            "BLOCK": BLOCK,
            "num_warps": WARPS if many else 4,
            **LAUNCH,
        }
        chunks = triton.cdiv(pixels, self.cut["PIXELS"])
        self.sizes = (pixels, channels, chunks)
        self.grid, self.joins = (batch * chunks, blocks), (batch * groups,)
        width = triton.next_power_of_2(channels // groups)
        joined = max(1, JOINED // width)
        rounds = triton.cdiv(chunks, joined)  # a constant in the kernel: at most a handful of values
        self.joined = {"ROUNDS": rounds, "JOINED": joined, "WIDTH": width, "num_warps": WARPS, **LAUNCH}
        self.parts, self.groups = (2, batch * chunks, channels), (2, batch * groups)


class TritonGroupNorm(Function):
    """Autograd function (x, shift_BC, weight, bias, groups, eps, silu) -> (normalised, x). See ``norms.group_norm``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool
    ) -> tuple[Tensor, Tensor]:
        x_nhwc = x.contiguous(memory_format=torch.channels_last)
        shift = None if shift is None else shift.contiguous()
        shape = _Shape(x, groups)
        # Buffers: statistics are float32 for any dtype of x.
        parts = x.new_empty(shape.parts, dtype=torch.float32)
        known = x.new_empty(shape.groups, dtype=torch.float32)
        has = {"SHIFT": shift is not None}
        y = torch.empty_like(x_nhwc)
        # Statistics per chunk, per group, then the output.
        moments[shape.grid](x_nhwc, shift, parts[0], parts[1], *shape.sizes, **has, **shape.cut)
        join_moments[shape.joins](
            parts[0],
            parts[1],
            known[0],
            known[1],
            *shape.sizes,
            groups,
            eps,
            PIXELS=shape.cut["PIXELS"],
            **shape.joined,
        )
        normalise[shape.grid](
            x_nhwc, shift, weight, bias, known[0], known[1], y, *shape.sizes, groups, SILU=silu, **has, **shape.cut
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_nhwc, shift, weight, bias, known)
        ctx.shape, ctx.number, ctx.flags = shape, groups, {"SILU": silu, **has}
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return residual, *[None] * 6
        x, shift, weight, bias, known = ctx.saved_tensors
        shape, groups = ctx.shape, ctx.number
        dy = dy.contiguous(memory_format=torch.channels_last)
        residual = None if residual is None else residual.contiguous(memory_format=torch.channels_last)
        parts, means = x.new_empty(shape.parts, dtype=torch.float32), torch.empty_like(known)
        dx = torch.empty_like(x)
        frozen = (x, shift, weight, bias, known[0], known[1])
        gradient_sums[shape.grid](dy, *frozen, parts[0], parts[1], *shape.sizes, groups, **ctx.flags, **shape.cut)
        join_sums[shape.joins](parts[0], parts[1], means[0], means[1], *shape.sizes, groups, **shape.joined)
        how = {**ctx.flags, "RESIDUAL": residual is not None, **shape.cut}
        input_gradient[shape.grid](dy, residual, *frozen, means[0], means[1], dx, *shape.sizes, groups, **how)
        dshift = None
        if ctx.needs_input_grad[1]:
            dshift = (dx if residual is None else dx - residual).sum(dim=(2, 3))
        return dx, dshift, *[None] * 5


class TritonResidual(Function):
    """Autograd function (x, y, bias_C) -> x + y + bias, in channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        x, y = (t.contiguous(memory_format=torch.channels_last) for t in (x, y))
        out = torch.empty_like(x)
        count = out.numel()
        add_bias_residual[(triton.cdiv(count, 2048),)](x, y, bias, out, count, x.shape[1], BLOCK=2048, **LAUNCH)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        dout = dout.contiguous(memory_format=torch.channels_last)  # once for both branches
        return dout, dout, None
