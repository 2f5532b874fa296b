"""Normalisation fused with neighbouring operations.

GroupNorm (arXiv 1803.08494) is fused with the sum before it and the SiLU after it; its weights are frozen. LayerNorm
(arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) are fused with the residual sum before them; each sample may have its
own scale and shift. Dimensions: B batch, C channels, H W height and width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lora_rocm.kernels import backend
from lora_rocm.kernels.backend import Implementation


def group_norm(
    x_BCHW: Tensor,
    norm: nn.GroupNorm,
    implementation: Implementation,
    shift_BC: Tensor | None = None,
    silu: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the normalised ``x + shift`` (after SiLU if ``silu``), and ``x`` itself for a residual sum.

    With Triton both outputs are in channels_last. The backward kernel of the first output also adds the gradient of the
    second, so a residual path needs no extra sum.
    """
    inputs, activation = "one input" if shift_BC is None else "sum", "SiLU" if silu else "no SiLU"
    if backend.launches(implementation, x_BCHW, lambda: f"norms.group_norm: {inputs}, {activation}"):
        from lora_rocm.kernels.group_norm_triton import TritonGroupNorm

        outputs: tuple[Tensor, Tensor] = TritonGroupNorm.apply(
            x_BCHW, shift_BC, norm.weight, norm.bias, norm.num_groups, norm.eps, silu
        )
        return outputs
    if implementation == "triton":
        hollow: tuple[Tensor, Tensor] = MetaGroupNorm.apply(x_BCHW, shift_BC, norm.num_groups)
        return hollow
    shifted = x_BCHW if shift_BC is None else x_BCHW + shift_BC[:, :, None, None]
    y = F.group_norm(shifted, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return F.silu(y) if silu else y, x_BCHW


@dataclass(frozen=True)
class RowNorm:
    """A norm over the last dimension: ``normalised * weight + bias``.

    weight: [D], or [B, D] with a row for each sample. It and ``bias`` may require a gradient.
    bias: tensor with the shape of ``weight``, or None.
    centred: whether the norm is a LayerNorm; otherwise it is an RMSNorm.
    dtype: dtype of the result; None means the weight's dtype.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool = False
    dtype: torch.dtype | None = None

    @property
    def result_dtype(self) -> torch.dtype:
        return self.dtype or self.weight.dtype


@dataclass(frozen=True)
class Branch:
    """The branch ``gate * y`` that is added to a residual stream.

    gate: [D], or [B, D] with a row for each sample; None means 1. It may require a gradient.
    eps: epsilon of an RMSNorm that is applied to ``y`` first, or None for no norm.
    """

    y: Tensor
    gate: Tensor | None = None
    eps: float | None = None


def add_layer_norm(
    x: Tensor, delta: Tensor | None, norm: nn.LayerNorm, implementation: Implementation
) -> tuple[Tensor, Tensor]:
    """Call ``add_norm`` with a LayerNorm module; ``delta`` is the branch, or None."""
    branch = None if delta is None else Branch(delta)
    return add_norm(x, branch, RowNorm(norm.weight, norm.bias, norm.eps, centred=True), implementation)


def add_norm(x: Tensor, branch: Branch | None, norm: RowNorm, implementation: Implementation) -> tuple[Tensor, Tensor]:
    """Return ``x`` plus the branch, and this sum normalised over the last dimension.

    If ``branch`` is None, the first result is ``x`` itself. Use it for a residual sum: the backward kernel of the
    second result also adds the gradient of the first.

    Args:
        x: residual stream [B, ..., D]. The sum has its dtype.
        branch: branch to add, with ``y`` in the shape of ``x``. If ``x`` is float32, ``y`` may have fewer bits (see
            ``residual_stream``).
        norm: norm to apply to the sum.
        implementation: see ``backend``.
    """
    if backend.launches(implementation, x, partial(_name, "add_norm", x, branch, norm)):
        total, y = _triton(x, branch, norm)
        assert y is not None, "there is a norm"
        return total, y
    total = x if branch is None else add_branch(x, branch, "eager")
    if norm.centred and norm.weight.ndim == 1 and norm.dtype is None:
        return total, F.layer_norm(total, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    normal = F.layer_norm(total, x.shape[-1:], eps=norm.eps) if norm.centred else rms_normal(total, norm.eps)
    y = normal * _by_row(norm.weight, x)
    return total, (y if norm.bias is None else y + _by_row(norm.bias, x)).to(norm.result_dtype)


def residual_stream(x: Tensor) -> Tensor:
    """Return ``x`` as the start of a residual stream.

    float16 is converted to float32, because the sum of many branches would overflow in float16.
    """
    return x.float() if x.dtype == torch.float16 else x


def normal_again(total: Tensor, norm: RowNorm, implementation: Implementation) -> Callable[[], Tensor]:
    """Return a function that recomputes the second result of ``add_norm`` from the first."""
    weight, bias = norm.weight.detach(), None if norm.bias is None else norm.bias.detach()
    frozen = replace(norm, weight=weight, bias=bias)
    return lambda: add_norm(total.detach(), None, frozen, implementation)[1]


def add_branch(x: Tensor, branch: Branch, implementation: Implementation) -> Tensor:
    """Return ``x`` plus the branch, [B, ..., D]."""
    if (branch.eps is not None or branch.gate is not None) and backend.launches(
        implementation, x, partial(_name, "add_branch", x, branch, None)
    ):
        return _triton(x, branch, None)[0]
    y = branch.y if branch.eps is None else rms_normal(branch.y, branch.eps)
    if branch.gate is None:
        return x + y
    gate = _by_row(branch.gate, x)
    if branch.gate.ndim == 1 or gate.requires_grad or torch.compiler.is_compiling():
        return torch.addcmul(x, y, gate).to(x.dtype)
    output: Tensor = _GatedSum.apply(x, y, gate)
    return output


def rms_normal(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Return ``x`` after an RMSNorm over the last dimension; the weight, if any, is frozen.

    Only ``x`` is kept for the backward pass.
    """
    if torch.compiler.is_compiling():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    output: Tensor = _RmsNormal.apply(x, eps, weight)
    return output


def _name(function: str, x: Tensor, branch: Branch | None, norm: RowNorm | None) -> str:
    """Return the name of the kernels that ``_triton`` launches for such inputs; see ``backend.launches``."""
    if branch is None:
        added = "nothing added"
    else:
        added = ("" if branch.gate is None else "gated ") + ("sum" if branch.eps is None else "sum with an RMSNorm")
    normed = "no norm" if norm is None else "LayerNorm" if norm.centred else "RMSNorm"
    given = branch.y.dtype if branch is not None else norm.result_dtype if norm is not None else x.dtype
    vectors = (None if branch is None else branch.gate, None if norm is None else norm.weight)
    rows = ", rows" if any(vector is not None and vector.ndim == 2 for vector in vectors) else ""
    stream = ", float32 stream" if x.dtype is torch.float32 is not given else ""
    return f"norms.{function}: {added}, {normed}{rows}{stream}"


def _triton(x: Tensor, branch: Branch | None, norm: RowNorm | None) -> tuple[Tensor, Tensor | None]:
    from lora_rocm.kernels.add_norm_triton import TritonAddNorm

    added = (None, None, None) if branch is None else (branch.y, branch.gate, branch.eps)
    weight, bias, eps, centred, dtype = (
        (None, None, 0.0, False, None)
        if norm is None
        else (norm.weight, norm.bias, norm.eps, norm.centred, norm.result_dtype)
    )
    outputs: tuple[Tensor, Tensor | None] = TritonAddNorm.apply(
        x, *added[:2], weight, bias, eps, added[2], centred, dtype
    )
    return outputs


def _by_row(vector: Tensor, x: Tensor) -> Tensor:
    """Reshape a vector [B, D] so that it broadcasts over ``x`` [B, ..., D]. A vector [D] is returned unchanged."""
    return vector if vector.ndim == 1 else vector.view(len(x), *[1] * (x.ndim - 2), x.shape[-1])


class _RmsNormal(Function):
    """RMSNorm that is recomputed in the backward pass.

    PyTorch's own RMSNorm keeps float32 copies, except on the GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, x.shape[-1:], weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = F.rms_norm(leaf, x.shape[-1:], weight, ctx.eps)
        return torch.autograd.grad(y, leaf, dy)[0], None, None


class _GatedSum(Function):
    """``x + gate * y`` with a frozen gate for each sample.

    The gate is not passed to ``save_for_backward``, because recomputation of a block runs up to its last saved tensor.
    So in a block that ends with this sum, recomputation stops before the product that gives ``y``. A gate shared by all
    samples is not allowed here: it may be a weight that is in main memory when the gradient arrives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        ctx.gate, ctx.dtype = gate, y.dtype
        return torch.addcmul(x, y, gate).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, (gradient * ctx.gate).to(ctx.dtype), None


def residual(x_BCHW: Tensor, y_BCHW: Tensor, bias_C: Tensor | None, implementation: Implementation) -> Tensor:
    """Return ``x + y + bias``; the bias is frozen and has one number per channel, or is None."""
    if bias_C is None:
        return x_BCHW + y_BCHW
    if backend.launches(implementation, x_BCHW, lambda: "norms.residual: bias"):
        from lora_rocm.kernels.group_norm_triton import TritonResidual

        output: Tensor = TritonResidual.apply(x_BCHW, y_BCHW, bias_C)
        return output
    return x_BCHW + y_BCHW + bias_C[:, None, None]


class MetaGroupNorm(Function):
    """Autograd function (x, shift_BC, groups) -> (normalised, x) for the meta device.

    It keeps ``x`` and two numbers per group, as ``TritonGroupNorm`` does.
    """

    @staticmethod
    def forward(ctx: Any, x_BCHW: Tensor, shift_BC: Tensor | None, groups: int) -> tuple[Tensor, Tensor]:
        known = x_BCHW.new_empty((2, len(x_BCHW) * groups), dtype=torch.float32)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_BCHW, shift_BC, known)
        return torch.empty_like(x_BCHW), x_BCHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, residual: Tensor | None) -> tuple[Tensor | None, ...]:
        x_BCHW, shift_BC, _ = ctx.saved_tensors
        dshift = torch.empty_like(shift_BC) if ctx.needs_input_grad[1] else None
        return residual if dy is None else torch.empty_like(x_BCHW), dshift, None
