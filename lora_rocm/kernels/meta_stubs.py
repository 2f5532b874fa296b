"""Stand-ins for Triton kernels on the meta device: they allocate and keep the same tensors, and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class HollowGroupNorm(Function):
    """(x, shift_BC, groups) -> (normalised, x). Keeps ``x`` and two numbers per group, as ``TritonGroupNorm`` does."""

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
