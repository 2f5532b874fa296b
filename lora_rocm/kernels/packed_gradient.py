"""Gradients that are contiguous, for operations that need all gradients in the same memory layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def with_packed_gradient(x: Tensor) -> Tensor:
    """Return ``x``, so that its gradient is contiguous. A gradient that is a part of wider rows is copied.

    It is for the output of attention. Torch's cuDNN attention reads each gradient with the strides of the first one for
    the same inputs (``checks.attention_layouts``). A compiler chooses the layouts itself.
    """
    if torch.compiler.is_compiling():
        return x
    packed: Tensor = _PackedGradient.apply(x)
    return packed


class _PackedGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # untyped: autograd's context
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # untyped: autograd's context
        return gradient.contiguous()
