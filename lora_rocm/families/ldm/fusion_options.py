"""Which modules of a UNet are fused, and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_rocm.kernels.choice import Form, form_for


@dataclass(frozen=True)
class Fusion:
    """What is fused, and how.

    projections: one product for query, key and value of one input. join: see ``lora_projections``.
    geglu, norms: the form of each, or None to leave it as it is.
    channels_last: convolutions' weights, and with them all pictures inside the UNet, in that layout.
    """

    projections: bool = True
    join: bool = False
    geglu: Form | None = "eager"
    norms: Form | None = "eager"
    channels_last: bool = False


def fusion_for(device: torch.device, triton: bool = True) -> Fusion:
    """What is best on a device; ``triton=False`` asks for plain PyTorch."""
    form = form_for(device, triton)
    return Fusion(geglu=form, norms=form, channels_last=form == "triton")
