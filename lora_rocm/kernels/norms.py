"""Normalisation with frozen weights, fused with neighbouring operations.

GroupNorm (arXiv 1803.08494) with the preceding sum and the following SiLU; LayerNorm (arXiv 1607.06450) with the
preceding residual sum. Weights get no gradient. Dimensions: B batch, C channels, H W height and width, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lora_rocm.kernels.backend import Form
from lora_rocm.kernels.meta_stubs import HollowGroupNorm


def group_norm(
    x_BCHW: Tensor, norm: nn.GroupNorm, form: Form, shift_BC: Tensor | None = None, silu: bool = True
) -> tuple[Tensor, Tensor]:
    """(normalised ``x + shift``, after SiLU if ``silu``; ``x`` itself, for a residual sum).

    In the Triton form both outputs are in channels_last, and the gradient of the second is added where that of the
    first is computed, so a residual path needs no sum of its own in the backward pass.
    """
    if form == "triton" and x_BCHW.is_meta:
        hollow: tuple[Tensor, Tensor] = HollowGroupNorm.apply(x_BCHW, shift_BC, norm.num_groups)
        return hollow
    if form == "triton":
        from lora_rocm.kernels.group_norm_triton import TritonGroupNorm

        outputs: tuple[Tensor, Tensor] = TritonGroupNorm.apply(
            x_BCHW, shift_BC, norm.weight, norm.bias, norm.num_groups, norm.eps, silu
        )
        return outputs
    shifted = x_BCHW if shift_BC is None else x_BCHW + shift_BC[:, :, None, None]
    y = F.group_norm(shifted, norm.num_groups, norm.weight, norm.bias, norm.eps)
    return F.silu(y) if silu else y, x_BCHW


def add_layer_norm(x: Tensor, delta: Tensor | None, norm: nn.LayerNorm, form: Form) -> tuple[Tensor, Tensor]:
    """(``x + delta``, its normalisation over the last dimension). If ``delta`` is None, the first is ``x`` itself."""
    if form == "triton" and not x.is_meta:
        from lora_rocm.kernels.layer_norm_triton import TritonAddLayerNorm

        outputs: tuple[Tensor, Tensor] = TritonAddLayerNorm.apply(x, delta, norm.weight, norm.bias, norm.eps)
        return outputs
    total = x if delta is None else x + delta
    return total, F.layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def residual(x_BCHW: Tensor, y_BCHW: Tensor, bias_C: Tensor | None, form: Form) -> Tensor:
    """``x + y + bias`` with a frozen bias per channel."""
    if bias_C is None:
        return x_BCHW + y_BCHW
    if form == "triton" and not x_BCHW.is_meta:
        from lora_rocm.kernels.group_norm_triton import TritonResidual

        output: Tensor = TritonResidual.apply(x_BCHW, y_BCHW, bias_C)
        return output
    return x_BCHW + y_BCHW + bias_C[:, None, None]
