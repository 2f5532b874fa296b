"""A frozen convolution that does not keep its input.

The gradient of the input needs the weight alone, but PyTorch's convolution keeps its input for the weight's gradient
as well, also where the weight gets none: in SDXL at 1024 px that is a quarter GiB a sample.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class FrozenConv2d(nn.Conv2d):
    """The same convolution; what is not frozen, or not of one format, goes PyTorch's way."""

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether a layer may become one."""
        return bool(module.padding_mode == "zeros" and not isinstance(module.padding, str))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        if not is_frozen or input.dtype != weight.dtype:
            plain: Tensor = super()._conv_forward(input, weight, bias)
            return plain
        how = (self.stride, self.padding, self.dilation, self.groups)
        output: Tensor = _FrozenConvolution.apply(input, weight, bias, *how)
        return output


class _FrozenConvolution(Function):
    """Its way back is a transposed convolution.

    PyTorch makes both by the same function, which does not ask for the input: ``cudnn_convolution_backward_input`` and
    ``miopen_convolution_backward_input`` (aten/src/ATen/native/cudnn/ConvShared.cpp, miopen/Conv_miopen.cpp).
    """

    @staticmethod
    def forward(ctx: Any, x_BCHW: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        # Not by save_for_backward: recomputing goes on to the last tensor that is saved, and would convolve for this.
        ctx.weight, ctx.shape, ctx.how = weight, x_BCHW.shape, how
        return F.conv2d(x_BCHW, weight, bias, *how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        weight, dx_BCHW = ctx.weight, None
        if ctx.needs_input_grad[0]:
            stride, padding, dilation, groups = ctx.how
            sides = zip(ctx.shape[2:], dy_BCHW.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
            rest = [side - (out - 1) * step + 2 * pad - gap * (k - 1) - 1 for side, out, k, step, pad, gap in sides]
            dx_BCHW = F.conv_transpose2d(dy_BCHW, weight, None, stride, padding, rest, groups, dilation)
        return dx_BCHW, None, None, None, None, None, None
