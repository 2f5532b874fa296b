"""RMSNorm of heads and rotary position embedding, one kernel forward and one backward. See ``rotary``."""

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
def _load_pairs(x, at, inside, pairs, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = at[:, :, None] + tl.arange(0, 2)[None, None, :]
        a, b = tl.split(tl.load(x + both, mask=inside[:, :, None], other=0.0))
    else:
        a = tl.load(x + at, mask=inside, other=0.0)
        b = tl.load(x + at + pairs, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(x, at, inside, pairs, a, b, INTERLEAVED: tl.constexpr):
    a, b = a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)
    if INTERLEAVED:
        both = at[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(x + both, tl.join(a, b), mask=inside[:, :, None])
    else:
        tl.store(x + at, a, mask=inside)
        tl.store(x + at + pairs, b, mask=inside)


@triton.jit
def _normal_token(
    x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, turn_pair, first, heads, pairs, eps,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Offsets within a token and what is inside; normalised pairs, their deviation, weights, cosine and sine."""
    token, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    one = pair * (2 if INTERLEAVED else 1)
    at, is_pair = head * (2 * pairs) + one, pair < pairs
    inside = (head < heads) & is_pair
    a, b = _load_pairs(x + batch * x_batch + token * x_row, at, inside, pairs, INTERLEAVED)
    rstd = (1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * pairs) + eps))[:, None]
    weight_a, weight_b = _load_pairs(weight, one, is_pair, pairs, INTERLEAVED)
    turn = batch * turn_batch + (first + token) * turn_row + pair * turn_pair
    c = tl.load(cos + turn, mask=is_pair, other=0.0)
    s = tl.load(sin + turn, mask=is_pair, other=0.0)
    return at, inside, a * rstd, b * rstd, rstd, weight_a, weight_b, c, s


@triton.jit
def norm_rotary_forward(
    x, weight, cos, sin, out, x_batch, x_row, turn_batch, turn_row, turn_pair, first, tokens, all_tokens,
    heads, pairs, eps, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One stream, whose tokens follow ``first`` others in the output; one program per token."""
    at, inside, a, b, _, weight_a, weight_b, c, s = _normal_token(
        x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, turn_pair, first, heads, pairs, eps, INTERLEAVED,
        HEADS, PAIRS,
    )  # fmt: skip
    a, b = a * weight_a, b * weight_b
    row = tl.program_id(1).to(tl.int64) * all_tokens + first + tl.program_id(0)
    _store_pairs(out + row * heads * (2 * pairs), at, inside, pairs, a * c - b * s, b * c + a * s, INTERLEAVED)


@triton.jit
def norm_rotary_backward(
    dout, x, weight, cos, sin, dx, x_batch, x_row, turn_batch, turn_row, turn_pair, first, tokens, all_tokens,
    heads, pairs, eps, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The gradient of one stream; one program per token."""
    at, inside, a, b, rstd, weight_a, weight_b, c, s = _normal_token(
        x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, turn_pair, first, heads, pairs, eps, INTERLEAVED,
        HEADS, PAIRS,
    )  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * all_tokens + first + tl.program_id(0)
    da, db = _load_pairs(dout + row * heads * (2 * pairs), at, inside, pairs, INTERLEAVED)
    da, db = (da * c + db * s) * weight_a, (db * c - da * s) * weight_b
    along = (tl.sum(da * a + db * b, axis=1) / (2 * pairs))[:, None]
    row = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    _store_pairs(
        dx + row * heads * (2 * pairs), at, inside, pairs, (da - a * along) * rstd, (db - b * along) * rstd, INTERLEAVED
    )


class TritonNormRotary(Function):
    """(cos, sin, interleaved, eps, x and weight of each stream) -> joined heads. See ``rotary.norm_rotary``."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, interleaved: bool, eps: float, *given: Tensor) -> Tensor:
        streams = [x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in given[::2]]
        batch, _, heads, dim = streams[0].shape
        out = streams[0].new_empty(batch, sum(x.shape[1] for x in streams), heads, dim)
        ctx.save_for_backward(cos, sin, *streams, *given[1::2])
        ctx.how = (interleaved, eps)
        first = 0
        for x, weight in zip(streams, given[1::2], strict=True):
            _launch(norm_rotary_forward, (x, weight, cos, sin, out), x, cos, first, out.shape[1], *ctx.how)
            first += x.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *given = ctx.saved_tensors
        dout, first, gradients = dout.contiguous(), 0, []
        for x, weight in zip(given[: len(given) // 2], given[len(given) // 2 :], strict=True):
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            _launch(norm_rotary_backward, (dout, x, weight, cos, sin, dx), x, cos, first, dout.shape[1], *ctx.how)
            gradients += [dx, None]
            first += x.shape[1]
        return None, None, None, None, *gradients


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    x: Tensor,
    cos: Tensor,
    first: int,
    total: int,
    interleaved: bool,
    eps: float,
) -> None:
    batch, tokens, heads, dim = x.shape
    turn = cos.stride() if cos.ndim == 3 else (0, *cos.stride())
    tile = {"HEADS": triton.next_power_of_2(heads), "PAIRS": triton.next_power_of_2(dim // 2)}
    warps = max(4, tile["HEADS"] * tile["PAIRS"] // 256)
    kernel[(tokens, batch)](
        *tensors, x.stride(0), x.stride(1), *turn, first, tokens, total, heads, dim // 2, eps,
        INTERLEAVED=interleaved, **tile, num_warps=warps, **LAUNCH,
    )  # fmt: skip
