"""UNets of inpainting models: their input is the noisy image, the mask, and the latents of what the mask does not hide.

The order is that of diffusers' ``StableDiffusionXLInpaintPipeline``. Dimensions: B batch, C channels, H W of latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lora_rocm.families.objectives.base import HIDDEN_MASK

CHANNELS = 9
FIRST_LAYER = "model.diffusion_model.input_blocks.0.0.weight"


def joined(noisy_BCHW: Tensor, batch: Mapping[str, Tensor], seen_BCHW: Tensor) -> Tensor:
    """The input of the UNet, [B, CHANNELS, H, W]. ``seen_BCHW``: normalised latents of what is seen."""
    return torch.cat([noisy_BCHW, batch[HIDDEN_MASK].to(noisy_BCHW.dtype), seen_BCHW], dim=1)


def config_changes(config: Mapping[str, object], tensors: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """As ``Layout.changed``: a file without a config says by its first layer that it is an inpainting model."""
    _, channels, *_ = tensors.get(FIRST_LAYER, (0, 0))
    return {"in_channels": CHANNELS} if channels == CHANNELS else {}


@contextmanager
def all_hidden(unet: nn.Module, seen_CHW: Tensor) -> Iterator[None]:
    """Inside the context the UNet takes noisy latents alone, and all of the image is hidden.

    ``seen_CHW``: normalised latents of a grey image.
    """

    def join(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        noisy_BCHW, *rest = args
        hidden = {HIDDEN_MASK: torch.ones_like(noisy_BCHW[:, :1])}
        seen_BCHW = seen_CHW.to(noisy_BCHW.dtype).expand(len(noisy_BCHW), -1, -1, -1)
        return (joined(noisy_BCHW, hidden, seen_BCHW), *rest), kwargs

    handle = unet.register_forward_pre_hook(join, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
