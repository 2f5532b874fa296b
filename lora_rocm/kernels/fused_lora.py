"""A frozen linear layer with its LoRA as one autograd function: y = x W^T + b + s (x A^T) B^T (arXiv 2106.09685).

The matrix product adds the LoRA update to the base output directly, forward and backward. So neither a scaled copy nor
a sum of two large tensors is written. Only ``x`` and the small ``h = s x A^T`` are kept.

Dimensions: M rows (all leading dimensions), I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.base_product import BaseProduct, base_gradient, base_outputs


def lora_linear(
    x: Tensor,
    weight_OI: Tensor | None,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
    product: BaseProduct | None = None,
) -> Tensor:
    """Return the output of a linear layer with LoRA, in the dtype of ``x``.

    Args:
        x: input [..., I], in float64, float32, bfloat16 or float16. Weight, bias, a and b have the same dtype.
        weight_OI: frozen base weight, or None if there is a ``product``.
        bias_O: frozen bias, or None.
        a_RI: LoRA's A, a leaf; its gradient has its dtype.
        b_OR: LoRA's B, also a leaf.
        scale: alpha / rank.
        product: the product with a base weight that is not dense. No dense weight is kept between passes. In a context
            of ``unpacked_once`` the backward pass may use the weight of the recomputation.
    """
    output: Tensor = _LoraLinear.apply(x, weight_OI, bias_O, a_RI, b_OR, scale, product)
    return output


def lora_projections(
    x: Tensor,
    weight_OI: Tensor | None,
    a_RI: Sequence[Tensor],
    b_OR: Sequence[Tensor],
    scale: float,
    bias_O: Tensor | None = None,
    product: BaseProduct | None = None,
) -> tuple[Tensor, ...]:
    """Return the outputs of several adapted projections of one input: one base product, and one product for all ``A``.

    Args:
        x: input [..., I].
        weight_OI: frozen weights of all projections, concatenated by rows, or None if there is a ``product``.
        a_RI: LoRA's A of each projection, in the order of the weights.
        b_OR: LoRA's B of each projection, in the order of the weights.
        scale: alpha / rank, the same for all projections.
        bias_O: frozen biases, concatenated as the weights, or None.
        product: see ``lora_linear``.

    Returns:
        One output per projection. With dense or unpacked weights they are views of one tensor, so their row stride is
        the sum of all output widths.
    """
    outputs: tuple[Tensor, ...] = _LoraProjections.apply(x, weight_OI, bias_O, scale, product, *a_RI, *b_OR)
    return outputs


class _LoraLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor | None,
        bias_O: Any,
        a_RI: Tensor,
        b_OR: Tensor,
        scale: float,
        product: BaseProduct | None,
    ) -> Tensor:
        x_MI = x.reshape(-1, x.shape[-1])
        h_MR = _scaled_product(x_MI, a_RI.t(), scale)
        rows, needed = [b_OR.shape[0]], ctx.needs_input_grad[0]
        (y_MO,), kept_OI = base_outputs(x_MI, weight_OI, bias_O, product, rows, needed)
        y_MO.addmm_(h_MR, b_OR.t())
        ctx.save_for_backward(x_MI, h_MR, kept_OI, a_RI, b_OR)
        ctx.scale, ctx.shape, ctx.product = scale, x.shape, product
        return y_MO.view(*x.shape[:-1], y_MO.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, h_MR, kept_OI, a_RI, b_OR = ctx.saved_tensors
        dy_MO = dy.reshape(-1, dy.shape[-1])
        dh_MR = _scaled_product(dy_MO, b_OR, ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = base_gradient([dy_MO], kept_OI, ctx.product).addmm_(dh_MR, a_RI).view(ctx.shape)
        da_RI = dh_MR.t() @ x_MI if ctx.needs_input_grad[3] else None
        db_OR = dy_MO.t() @ h_MR if ctx.needs_input_grad[4] else None
        return dx, None, None, da_RI, db_OR, None, None


class _LoraProjections(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor | None,
        bias_O: Tensor | None,
        scale: float,
        product: BaseProduct | None,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(leaves) // 2
        all_a_RI, b_OR = torch.cat(leaves[:count]), leaves[count:]
        x_MI = x.reshape(-1, x.shape[-1])
        rows, needed = [b.shape[0] for b in b_OR], ctx.needs_input_grad[0]
        outputs, kept_OI = base_outputs(x_MI, weight_OI, bias_O, product, rows, needed)
        h_MR = _scaled_product(x_MI, all_a_RI.t(), scale)
        for y, h, b in zip(outputs, h_MR.split([b.shape[1] for b in b_OR], dim=1), b_OR, strict=True):
            y.addmm_(h, b.t())
        ctx.save_for_backward(x_MI, h_MR, kept_OI, all_a_RI, *b_OR)
        ctx.scale, ctx.shape, ctx.product = scale, x.shape, product
        return tuple(y.view(*x.shape[:-1], y.shape[1]) for y in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, h_MR, kept_OI, all_a_RI, *b_OR = ctx.saved_tensors
        ranks = [b.shape[1] for b in b_OR]
        dy_MO = [d.reshape(-1, d.shape[-1]) for d in dy]
        dh_MR = torch.empty_like(h_MR)
        for dh, d, b in zip(dh_MR.split(ranks, dim=1), dy_MO, b_OR, strict=True):
            dh.addmm_(d, b, beta=0, alpha=ctx.scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = base_gradient(dy_MO, kept_OI, ctx.product).addmm_(dh_MR, all_a_RI).view(ctx.shape)
        da_RI = (dh_MR.t() @ x_MI).split(ranks)
        db_OR = [d.t() @ h for d, h in zip(dy_MO, h_MR.split(ranks, dim=1), strict=True)]
        return dx, None, None, None, None, *da_RI, *db_OR


def _scaled_product(left: Tensor, right_factor: Tensor, scale: float) -> Tensor:
    """Return ``scale * left @ right_factor`` in one operation.

    (With beta 0, addmm does not read the uninitialised output.)
    """
    if scale == 1:
        return left @ right_factor
    return left.new_empty(left.shape[0], right_factor.shape[1]).addmm_(left, right_factor, beta=0, alpha=scale)
