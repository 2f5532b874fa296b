"""Triton kernels for an optional RMSNorm of heads with rotary position embedding: one forward, one backward.

See ``rotary``.
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
def _load_pairs(x, start, is_row, pairs, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load rows that begin at ``start`` [rows, 1]. Return the first numbers of all pairs, and the second numbers."""
    if INTERLEAVED:
        number = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(x + start + number, mask=is_row & (number < 2 * pairs), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        a = tl.load(x + start + pair, mask=is_row & (pair < pairs), other=0.0)
        b = tl.load(x + start + pairs + pair, mask=is_row & (pair < pairs), other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _store_pairs(x, start, is_row, pairs, a, b, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    a, b = a.to(x.dtype.element_ty), b.to(x.dtype.element_ty)
    if INTERLEAVED:
        number = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PAIRS))
        tl.store(x + start + number, both, mask=is_row & (number < 2 * pairs))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        tl.store(x + start + pair, a, mask=is_row & (pair < pairs))
        tl.store(x + start + pairs + pair, b, mask=is_row & (pair < pairs))


@triton.jit
def _turn(cos, sin, turn_batch, turn_row, first, pairs, TURN_PAIR: tl.constexpr, PAIRS: tl.constexpr):
    """Load cosine and sine for each pair of a token, [1, pairs]."""
    pair = tl.arange(0, PAIRS)[None, :]
    turn = tl.program_id(1).to(tl.int64) * turn_batch + (first + tl.program_id(0)) * turn_row + pair * TURN_PAIR
    c = tl.load(cos + turn, mask=pair < pairs, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=pair < pairs, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _load_token(
    x, x_batch, x_row, heads, pairs, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Load a token. Return the offsets of its heads, the mask of heads that exist, and the two numbers of each pair."""
    token, batch, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, HEADS)[:, None]
    start, is_head = head * (2 * pairs), head < heads
    a, b = _load_pairs(x + batch * x_batch + token * x_row, start, is_head, pairs, PAIRS, INTERLEAVED)
    return start, is_head, a, b


@triton.jit
def _normal_token(
    x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, first, heads, pairs, eps,
    TURN_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load and normalise a token.

    Return the offsets of its heads, the mask of heads that exist, the normalised pairs, the reciprocal deviation, the
    weights, cosine and sine.
    """
    start, is_head, a, b = _load_token(x, x_batch, x_row, heads, pairs, HEADS, PAIRS, INTERLEAVED)
    rstd = (1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * pairs) + eps))[:, None]
    one = tl.arange(0, 1)[:, None]
    weight_a, weight_b = _load_pairs(weight, one, one < 1, pairs, PAIRS, INTERLEAVED)
    c, s = _turn(cos, sin, turn_batch, turn_row, first, pairs, TURN_PAIR, PAIRS)
    return start, is_head, a * rstd, b * rstd, rstd, weight_a, weight_b, c, s


@triton.jit
def norm_rotary_forward(
    x, weight, cos, sin, out, x_batch, x_row, turn_batch, turn_row, first, tokens, all_tokens, heads, pairs, eps,
    TURN_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr = True,
):  # fmt: skip
    """Normalise and rotate one stream; one program per token.

    ``first``: number of tokens of earlier streams in the output.
    """
    if NORM:
        start, is_head, a, b, _, weight_a, weight_b, c, s = _normal_token(
            x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, first, heads, pairs, eps, TURN_PAIR, INTERLEAVED,
            HEADS, PAIRS,
        )  # fmt: skip
        a, b = a * weight_a, b * weight_b
    else:
        start, is_head, a, b = _load_token(x, x_batch, x_row, heads, pairs, HEADS, PAIRS, INTERLEAVED)
        c, s = _turn(cos, sin, turn_batch, turn_row, first, pairs, TURN_PAIR, PAIRS)
    row = (tl.program_id(1).to(tl.int64) * all_tokens + first + tl.program_id(0)) * heads * (2 * pairs)
    _store_pairs(out + row, start, is_head, pairs, a * c - b * s, b * c + a * s, PAIRS, INTERLEAVED)


@triton.jit
def norm_rotary_backward(
    dout, x, weight, cos, sin, dx, x_batch, x_row, turn_batch, turn_row, first, tokens, all_tokens, heads, pairs, eps,
    TURN_PAIR: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    NORM: tl.constexpr = True,
):  # fmt: skip
    """Write the gradient of one stream; one program per token. Without a norm, ``x`` is not read."""
    if NORM:
        start, is_head, a, b, rstd, weight_a, weight_b, c, s = _normal_token(
            x, weight, cos, sin, x_batch, x_row, turn_batch, turn_row, first, heads, pairs, eps, TURN_PAIR, INTERLEAVED,
            HEADS, PAIRS,
        )  # fmt: skip
    else:
        head = tl.arange(0, HEADS)[:, None]
        start, is_head = head * (2 * pairs), head < heads
        c, s = _turn(cos, sin, turn_batch, turn_row, first, pairs, TURN_PAIR, PAIRS)
    row = (tl.program_id(1).to(tl.int64) * all_tokens + first + tl.program_id(0)) * heads * (2 * pairs)
    da, db = _load_pairs(dout + row, start, is_head, pairs, PAIRS, INTERLEAVED)
    da, db = da * c + db * s, db * c - da * s
    row = (tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)) * heads * (2 * pairs)
    if NORM:
        da, db = da * weight_a, db * weight_b
        along = (tl.sum(da * a + db * b, axis=1) / (2 * pairs))[:, None]
        da, db = (da - a * along) * rstd, (db - b * along) * rstd
    _store_pairs(dx + row, start, is_head, pairs, da, db, PAIRS, INTERLEAVED)


class TritonNormRotary(Function):
    """Autograd function (cos, sin, interleaved, eps, x and weight of each stream) -> concatenated heads.

    See ``rotary.norm_rotary``. Streams without a weight have no norm, and are not saved for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, interleaved: bool, eps: float, *given: Tensor | None) -> Tensor:
        streams = [x for x in given[::2] if x is not None]
        streams = [x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous() for x in streams]
        batch, _, heads, dim = streams[0].shape
        out = streams[0].new_empty(batch, sum(x.shape[1] for x in streams), heads, dim)
        weights = given[1::2]
        ctx.save_for_backward(
            cos, sin, *(None if w is None else x for x, w in zip(streams, weights, strict=True)), *weights
        )
        ctx.how, ctx.shapes = (interleaved, eps), [x.shape for x in streams]
        first = 0
        for x, weight in zip(streams, weights, strict=True):
            _launch(norm_rotary_forward, (x, weight, cos, sin, out), x, x.shape, cos, first, out.shape[1], *ctx.how)
            first += x.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *given = ctx.saved_tensors
        dout, first, gradients, count = dout.contiguous(), 0, [], len(ctx.shapes)
        for x, weight, shape in zip(given[:count], given[count:], ctx.shapes, strict=True):
            dx = dout.new_empty(shape)
            tensors = (dout, x, weight, cos, sin, dx)
            _launch(norm_rotary_backward, tensors, x, shape, cos, first, dout.shape[1], *ctx.how)
            gradients += [dx, None]
            first += shape[1]
        return None, None, None, None, *gradients


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    x: Tensor | None,
    shape: torch.Size,
    cos: Tensor,
    first: int,
    total: int,
    interleaved: bool,
    eps: float,
) -> None:
    batch, tokens, heads, dim = shape
    *turn, turn_pair = cos.stride() if cos.ndim == 3 else (0, *cos.stride())
    tile = {"HEADS": triton.next_power_of_2(heads), "PAIRS": triton.next_power_of_2(dim // 2)}
    warps = max(4, tile["HEADS"] * tile["PAIRS"] // 256)
    rows = (0, 0) if x is None else x.stride()[:2]
    norm = {} if tensors[-4] is not None else {"NORM": False}
    kernel[(tokens, batch)](
        *tensors, *rows, *turn, first, tokens, total, heads, dim // 2, eps,
        TURN_PAIR=turn_pair, INTERLEAVED=interleaved, **tile, **norm, num_warps=warps, **LAUNCH,
    )  # fmt: skip
