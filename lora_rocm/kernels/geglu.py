"""GEGLU (arXiv 2002.05202): a * gelu(g) with the exact gelu, for a projection that holds a and g side by side.

Dimensions: M rows (all leading dimensions), I inputs, N width of a and of g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels.backend import Form


def geglu(ag: Tensor, form: Form) -> Tensor:
    """Return ``a * gelu(g)`` in the dtype of ``ag``. Only ``ag`` is kept for the backward pass.

    Args:
        ag: [..., 2N], contiguous; a is the first half, g the second. The backward pass overwrites it with its gradient,
            so nothing else may use it then.
        form: see ``backend``.
    """
    if torch.compiler.is_compiling():  # the compiler fuses it, and refuses writes into halves
        a, g = ag.chunk(2, dim=-1)
        output: Tensor = a * F.gelu(g)
    elif form == "triton" and not ag.is_meta:
        from lora_rocm.kernels.geglu_triton import TritonGeglu

        output = TritonGeglu.apply(ag)
    else:
        output = _Geglu.apply(ag)
    return output


def geglu_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """GEGLU of ``x W^T + b`` with frozen W [2N, I] and b [2N], in plain PyTorch.

    Two products make a and g as separate tensors, so no strided halves are read or written. Their gradients are never
    concatenated: the second product of the backward pass accumulates onto the first.
    """
    output: Tensor = _ProjectedGeglu.apply(x, weight, bias)
    return output


class _Geglu(Function):
    @staticmethod
    def forward(ctx: Any, ag: Tensor) -> Tensor:
        a, g = ag.chunk(2, dim=-1)
        ctx.save_for_backward(ag)
        return F.gelu(g).mul_(a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        ag: Tensor
        (ag,) = ctx.saved_tensors
        a, g = ag.chunk(2, dim=-1)
        dgelu = dy * a
        torch.ops.aten.gelu.out(g, out=a).mul_(dy)
        torch.ops.aten.gelu_backward.grad_input(dgelu, g, grad_input=g)
        return ag


class _ProjectedGeglu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (weight_a, weight_g), (bias_a, bias_g) = weight.chunk(2), bias.chunk(2) if bias is not None else (None, None)
        x_MI = x.reshape(-1, x.shape[-1])
        a_MN, g_MN = F.linear(x_MI, weight_a, bias_a), F.linear(x_MI, weight_g, bias_g)
        ctx.save_for_backward(a_MN, g_MN, weight)
        ctx.shape = x.shape
        return F.gelu(g_MN).mul_(a_MN).view(*x.shape[:-1], a_MN.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        a_MN, g_MN, weight = ctx.saved_tensors
        weight_a, weight_g = weight.chunk(2)
        dy_MN = dy.reshape(a_MN.shape)
        dx_MI = F.gelu(g_MN).mul_(dy_MN) @ weight_a
        da_MN = dy_MN * a_MN
        dg_MN = torch.ops.aten.gelu_backward.grad_input(da_MN, g_MN, grad_input=da_MN)
        return dx_MI.addmm_(dg_MN, weight_g).view(ctx.shape), None, None
