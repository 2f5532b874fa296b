"""A gated residual sum with the LayerNorm or RMSNorm that follows: one kernel forward and one backward. See ``norms``.

A row fits into registers, so the backward kernel recomputes its mean and deviation. Only the sum and the branch are
kept.
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
def _normal_row(value, inside, width, eps, CENTRED: tl.constexpr):
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
    return value * rstd, rstd


@triton.jit
def _row_gradient(gradient, normal, rstd, width, CENTRED: tl.constexpr):
    along = tl.sum(gradient * normal, axis=0) / width
    result = gradient - normal * along
    if CENTRED:
        result -= tl.sum(gradient, axis=0) / width
    return result * rstd


@triton.jit
def add_norm_forward(
    x, branch, gate, weight, bias, total, y, width, rows, eps, branch_eps,
    BRANCH: tl.constexpr, GATE: tl.constexpr, BRANCH_NORM: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sum and the normalised sum; one program per row.

    ``rows``: number of consecutive rows of x that share one row of gate, weight and bias.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at, shared = row.to(tl.int64) * width + column, row // rows * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if BRANCH:
        added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH_NORM:
            added = _normal_row(added, inside, width, branch_eps, False)[0]
        if GATE:
            added *= tl.load(gate + shared, mask=inside, other=0.0).to(tl.float32)
        rounded = (value + added).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORM:
        normal = _normal_row(value, inside, width, eps, CENTRED)[0]
        normal *= tl.load(weight + shared, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            normal += tl.load(bias + shared, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, normal.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _branch_gradient(
    gradient, branch, gate, dbranch, dgate, at, shared, inside, width, branch_eps,
    GATE: tl.constexpr, BRANCH_NORM: tl.constexpr, GATE_GRADIENT: tl.constexpr,
):  # fmt: skip
    if BRANCH_NORM or GATE_GRADIENT:
        added = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH_NORM:
            added, rstd = _normal_row(added, inside, width, branch_eps, False)
        if GATE_GRADIENT:
            tl.store(dgate + at, (gradient * added).to(dgate.dtype.element_ty), mask=inside)
    if GATE:
        gradient *= tl.load(gate + shared, mask=inside, other=0.0).to(tl.float32)
    if BRANCH_NORM:
        gradient = _row_gradient(gradient, added, rstd, width, False)
    tl.store(dbranch + at, gradient.to(dbranch.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    dy, residual, total, branch, gate, weight, dx, dbranch, dgate, dweight, width, rows, eps, branch_eps,
    RESIDUAL: tl.constexpr, GATE: tl.constexpr, BRANCH_NORM: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    GATE_GRADIENT: tl.constexpr, WEIGHT_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the sum, and the gradient of the branch if it differs; one program per row.

    The gradients of gate and weight are sums over rows. The kernel writes the terms, one row each, and the caller adds
    them.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at, shared = row.to(tl.int64) * width + column, row // rows * width + column
    # The gradient through the norm; the row's statistics are recomputed.
    result = tl.zeros([BLOCK], tl.float32)
    if NORM:
        value = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        normal, rstd = _normal_row(value, inside, width, eps, CENTRED)
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHT_GRADIENT:
            tl.store(dweight + at, (gradient * normal).to(dweight.dtype.element_ty), mask=inside)
        gradient *= tl.load(weight + shared, mask=inside, other=0.0).to(tl.float32)
        result = _row_gradient(gradient, normal, rstd, width, CENTRED)
    # The gradient of the residual path, then of the branch.
    if RESIDUAL:
        result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=inside)
    if BRANCH_NORM or GATE:
        _branch_gradient(
            result,
            branch,
            gate,
            dbranch,
            dgate,
            at,
            shared,
            inside,
            width,
            branch_eps,
            GATE,
            BRANCH_NORM,
            GATE_GRADIENT,
        )


class TritonAddNorm(Function):
    """Autograd function (x, branch, gate, weight, bias, eps, branch_eps, centred, dtype) -> (sum, normalised or None).

    See ``norms.add_norm``. Branch, gate, weight, bias and branch_eps may be None. Without a weight nothing is
    normalised.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        branch_eps: float | None,
        centred: bool,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None]:
        # The launch.
        flat, width = x.contiguous(), x.shape[-1]
        vectors, shared_by = _rows_of(x, gate, weight, bias)
        branch = None if branch is None else branch.contiguous()
        total = flat if branch is None else torch.empty_like(flat)
        y = None if weight is None else torch.empty_like(flat, dtype=dtype)
        sizes = (width, shared_by, eps, 0.0 if branch_eps is None else branch_eps)
        flags = {"GATE": gate is not None, "BRANCH_NORM": branch_eps is not None, "NORM": y is not None}
        flags |= {"CENTRED": centred, **_block(width)}
        add_norm_forward[(x.numel() // width,)](
            flat, branch, *vectors, total, y, *sizes, BRANCH=branch is not None, BIAS=bias is not None, **flags
        )
        # Tensors for the backward pass.
        ctx.set_materialize_grads(False)
        reads_branch = branch_eps is not None or ctx.needs_input_grad[2]
        # Recomputation of a block runs up to its last saved tensor. See ``norms._GatedSum`` for a gate alone.
        only_gate = y is None and not reads_branch and gate is not None and gate.ndim == 2
        ctx.gate = vectors[0] if only_gate else None
        saved = (None if y is None else total, branch if reads_branch else None, *vectors[:2])
        ctx.save_for_backward(*(saved if ctx.gate is None else ()))
        ctx.given, ctx.sizes, ctx.flags = (None if branch is None else branch.dtype, gate, weight, bias), sizes, flags
        ctx.dtype = x.dtype
        return (x if branch is None else total), y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, residual: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, branch, gate, weight = ctx.saved_tensors if ctx.gate is None else (None, None, ctx.gate, None)
        branch_dtype, *vectors = ctx.given
        dy = None if dy is None else dy.contiguous()
        residual = None if residual is None else residual.contiguous()
        known = residual if dy is None else dy
        if known is None:
            return (None,) * 9
        norm = dy is not None
        flags = {**ctx.flags, "NORM": norm, "GATE_GRADIENT": ctx.needs_input_grad[2]}
        flags["WEIGHT_GRADIENT"] = norm and ctx.needs_input_grad[3]
        # Buffers: only for the gradients that are needed.
        has_own = flags["GATE"] or flags["BRANCH_NORM"]  # the branch's gradient differs from the sum's
        dx = torch.empty_like(known, dtype=ctx.dtype) if norm else residual
        dbranch = torch.empty_like(known, dtype=branch_dtype) if has_own else None
        dgate, dweight = (
            torch.empty_like(known, dtype=ctx.dtype) if wanted else None
            for wanted in (flags["GATE_GRADIENT"], flags["WEIGHT_GRADIENT"])
        )
        if has_own or norm:
            add_norm_backward[(known.numel() // known.shape[-1],)](
                dy, residual, total, branch, gate, weight, dx, dbranch, dgate, dweight, *ctx.sizes,
                RESIDUAL=residual is not None, **flags,
            )  # fmt: skip
        products = (dgate, dweight, dy if ctx.needs_input_grad[4] else None)
        summed = (_summed(rows, vector) for rows, vector in zip(products, vectors, strict=True))
        return dx, (dbranch if has_own else dx) if branch_dtype else None, *summed, None, None, None, None


def _rows_of(x: Tensor, *vectors: Tensor | None) -> tuple[list[Tensor | None], int]:
    """Return the vectors, each expanded to a single row or to one row per sample.

    Also return the number of rows of ``x`` that share one such row.
    """
    per_sample = any(vector is not None and vector.ndim == 2 for vector in vectors)
    shape = (len(x), x.shape[-1]) if per_sample else x.shape[-1:]
    rows = x.numel() // x.shape[-1] // (len(x) if per_sample else 1)
    return [None if vector is None else vector.expand(shape).contiguous() for vector in vectors], rows


def _summed(products: Tensor | None, vector: Tensor | None) -> Tensor | None:
    """Sum rows of products over all rows that share a row of ``vector``.

    Return the gradient in the shape of ``vector``.
    """
    if products is None or vector is None:
        return None
    samples = len(vector) if vector.ndim == 2 else 1
    return products.view(samples, -1, products.shape[-1]).sum(dim=1).view_as(vector).to(vector.dtype)


def _block(width: int) -> dict[str, Any]:
    block = int(triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": max(4, block // 512), **LAUNCH}
