"""Options of UNet fusion."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_rocm.kernels.backend import Form, form_for


@dataclass(frozen=True)
class Fusion:
    """Which modules are fused, and in which form.

    projections: one product for query, key and value of one input.
    join: see ``lora_projections``.
    geglu, norms: the form of each; None leaves it unfused.
    channels_last: memory layout of the convolutions' weights, and thereby of all feature maps of the UNet.
    """

    projections: bool = True
    join: bool = False
    geglu: Form | None = "eager"
    norms: Form | None = "eager"
    channels_last: bool = False


def fusion_for(device: torch.device, triton: bool = True) -> Fusion:
    """The best options for a device. ``triton=False`` uses plain PyTorch only."""
    form = form_for(device, triton)
    return Fusion(geglu=form, norms=form, channels_last=form == "triton")
