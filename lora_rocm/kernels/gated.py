"""Gated activations (arXiv 2002.05202): GEGLU, a * gelu(g), with gelu exact or by tanh; and SwiGLU, a * silu(g).

Dimensions: M rows (all leading dimensions), I inputs, N width of a and of g.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Implementation

Activation = Literal["gelu", "gelu-tanh", "silu"]
ACTIVATIONS: dict[Activation, tuple[Callable[..., Tensor], ...]] = {
    "gelu": (F.gelu, torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input),
    "gelu-tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu.out, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
    "silu": (F.silu, torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input),
}


def gated(activation: Activation, implementation: Implementation, a: Tensor, g: Tensor | None = None) -> Tensor:
    """Return ``a * activation(g)`` in the dtype of ``a``. Only ``a`` and ``g`` are saved for the backward pass.

    Args:
        activation: name of the activation function.
        implementation: see ``backend``.
        a: [..., N]. If ``g`` is None: [..., 2N], with a in the first half and g in the second. The backward pass
            overwrites it with its gradient, so no other operation may need it after that.
        g: [..., N], overwritten like ``a``; or None.
    """
    implementation = backend.decided(implementation, lambda: f"gated.gated: {activation}")
    if torch.compiler.is_compiling():  # the compiler fuses it, and refuses writes into halves
        a, g = _halves(a, g)
        output: Tensor = a * ACTIVATIONS[activation][0](g)
    elif backend.launches(implementation, a, lambda: f"gated.gated: {activation}"):
        from lora_rocm.kernels.gated_triton import TritonGated

        output = TritonGated.apply(activation, a, g)
    else:
        output = _Gated.apply(activation, a, g)
    return output


def activated(activation: Activation, implementation: Implementation, g: Tensor) -> Tensor:
    """Return ``activation(g)``. No other operation may use ``g``.

    Plain PyTorch keeps ``g``, and the backward pass overwrites it with its gradient. For bfloat16, the Triton kernels
    overwrite ``g`` with the output, and keep only the slope of each number, as a byte: half of the memory. (arXiv
    2202.00441 does so with fewer bits.) The slope's rounding error is at most 0.0025, similar to the relative error of
    a bfloat16 gradient (0.002 to 0.004). In the backward pass they overwrite the output's gradient with the gradient of
    ``g``.
    """
    implementation = backend.decided(implementation, lambda: f"gated.activated: {activation}")
    if torch.compiler.is_compiling():
        output: Tensor = ACTIVATIONS[activation][0](g)
    elif implementation == "triton" and g.dtype is torch.bfloat16:
        output = _ActivatedWithSlopes.apply(activation, g)
    else:
        output = _Activated.apply(activation, g)
    return output


def geglu_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return GEGLU of ``x W^T + b`` with frozen W [2N, I] and b [2N], in plain PyTorch.

    Two products compute a and g as separate tensors, so no strided halves are read or written. In the backward pass the
    second product is added to the result of the first, so the gradients are never concatenated.
    """
    output: Tensor = _ProjectedGeglu.apply(x, weight, bias)
    return output


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, a: Tensor, g: Tensor | None) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(a, g)
        a, g = _halves(a, g)
        return ACTIVATIONS[activation][0](g).mul_(a)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        _, activate, differentiate = ACTIVATIONS[ctx.activation]
        given = ctx.saved_tensors
        a, g = _halves(*given)
        dactive = dy * a
        activate(g, out=a).mul_(dy)
        differentiate(dactive, g, grad_input=g)
        return None, *given


class _Activated(Function):
    @staticmethod
    def forward(ctx: Any, activation: Activation, g: Tensor) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(g)
        output: Tensor = ACTIVATIONS[activation][0](g)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (g,) = ctx.saved_tensors
        return None, ACTIVATIONS[ctx.activation][2](dy, g, grad_input=g)


class _ActivatedWithSlopes(Function):
    """The Triton implementation of ``activated``.

    On the meta device it allocates the same tensors, but computes nothing.
    """

    @staticmethod
    def forward(ctx: Any, activation: Activation, g: Tensor) -> Tensor:
        output = g.detach().contiguous()
        slopes = torch.empty_like(output, dtype=torch.uint8)
        backend.note_kernel(g, lambda: f"gated.activated: {activation}")
        if not g.is_meta:
            from lora_rocm.kernels.gated_triton import launch_activated

            launch_activated(output, slopes, activation)
        ctx.save_for_backward(slopes)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (slopes,) = ctx.saved_tensors
        dy = dy.contiguous()
        if not dy.is_meta:
            from lora_rocm.kernels.gated_triton import launch_slopes

            launch_slopes(dy, slopes)
        return None, dy


def _halves(a: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    if g is not None:
        return a, g
    first, second = a.chunk(2, dim=-1)
    return first, second


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
