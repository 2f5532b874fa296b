"""The repeated blocks of a diffusers UNet."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import nn


def blocks_of(unet: Any) -> list[nn.Module]:
    """ResNets and transformer blocks in forward order, except the first ResNet of the middle.

    These are the blocks that diffusers can recompute.
    """
    found: list[nn.Module] = []
    none: list[nn.Module] = []
    for part in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
        attentions = [list(attention.transformer_blocks) for attention in getattr(part, "attentions", ())]
        resnets = [[resnet] for resnet in part.resnets]
        pairs = (attentions, resnets[1:]) if part is unet.mid_block else (resnets, attentions)
        for first, second in zip_longest(*pairs, fillvalue=none):
            found += [*first, *second]
    return found
