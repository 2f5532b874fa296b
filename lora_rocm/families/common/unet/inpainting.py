"""Inputs for UNets of inpainting models: the noisy image, the mask, and the latents of the visible part.

The order is the same as in diffusers' ``StableDiffusionXLInpaintPipeline``.

Dimensions: B batch, C channels, H W of latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn

from lora_rocm.dataset.companions.masks import decode_mask, mask_on_grid
from lora_rocm.dataset.images.buckets import covering
from lora_rocm.dataset.images.image_io import decode, resized_crop
from lora_rocm.dataset.images.preview_images import MISFIT_FIX, misfit
from lora_rocm.errors import DataError, ModelError
from lora_rocm.families.base import PreviewRequest
from lora_rocm.families.common.vae import read_image
from lora_rocm.families.objectives.base import HIDDEN_MASK
from lora_rocm.model_files.config_file import Config
from lora_rocm.recipe.sample_section import SampleSection
from lora_rocm.recipe.yaml_tree import dotted

CHANNELS = 9
FIRST_LAYER = "model.diffusion_model.input_blocks.0.0.weight"


def joined(noisy_BCHW: Tensor, batch: Mapping[str, Tensor], seen_BCHW: Tensor) -> Tensor:
    """Return the UNet's input [B, CHANNELS, H, W]. ``seen_BCHW``: normalised latents of the visible part."""
    return torch.cat([noisy_BCHW, batch[HIDDEN_MASK].to(noisy_BCHW.dtype), seen_BCHW], dim=1)


def config_changes(config: Config, tensors: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """Implements ``Layout.changed``. Recognises an inpainting model without a config by its first layer."""
    _, channels, *_ = tensors.get(FIRST_LAYER, (0, 0))
    return {"in_channels": CHANNELS} if channels == CHANNELS else {}


def require_masks_read(channels: int, sample: SampleSection) -> None:
    """Refuse masks of previews if the base cannot read masks. ``channels``: number of the UNet's input channels.

    Raises:
        ModelError: masks-unused.
    """
    masked = [sample.key_of("mask", *each[:2]) for each in sample.numbered() if each[2].mask]
    if masked and channels != CHANNELS:
        what = (
            f"This base cannot read masks: its UNet has {channels} input channels, but an inpainting "
            f"UNet has {CHANNELS}."
        )
        fix = "Remove the masks and their control images, or train an inpainting base."
        raise ModelError("masks-unused", what, where=dotted(masked[0]), fix=fix)


def seen_and_hidden(request: PreviewRequest) -> tuple[Tensor, Tensor]:
    """Return the visible pixels of a preview [3, H, W] in [-1, 1], and its mask [1, H, W].

    The mask is 1.0 where the model draws, else 0.0. The image and its mask are scaled to cover the preview and cropped
    at the centre. Without a mask, everything is hidden.

    Raises:
        DataError: a file cannot be read, or the mask and its image have different proportions.
    """
    if "mask" not in request.inputs:
        return torch.zeros(3, request.height, request.width), torch.ones(1, request.height, request.width)
    image = read_image(request.inputs["control_image"], "control image", decode)
    mask = read_image(request.inputs["mask"], "mask", partial(decode_mask, alpha=False))
    if fault := misfit(mask.size, image.size):
        where = str(request.inputs["mask"])
        raise DataError("mask-misfit", f"The preview cannot be drawn: {fault}.", where=where, fix=MISFIT_FIX)
    geometry = covering((image.height, image.width), (request.height, request.width))
    hidden_HW = mask_on_grid(np.asarray(mask), geometry, False, (1, 1)) >= 0.5
    hidden_1HW = torch.from_numpy(hidden_HW.astype(np.float32))[None]
    pixels_BCHW: Tensor = VaeImageProcessor(vae_scale_factor=1).preprocess(resized_crop(image, geometry, flip=False))
    return pixels_BCHW[0] * (1.0 - hidden_1HW), hidden_1HW


@contextmanager
def given(unet: nn.Module, seen_BCHW: Tensor, hidden_BCHW: Tensor) -> Iterator[None]:
    """A context in which the UNet takes only noisy latents. The mask and the visible part are added in each call.

    The batch size has to be B or a multiple of B.

    seen_BCHW: normalised latents of the visible part. hidden_BCHW: the mask, 1.0 where the model draws.
    """

    def join(
        module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        noisy_BCHW, *rest = args
        # twice with guidance: without the prompt, then with the prompt
        times = (len(noisy_BCHW) // len(seen_BCHW), 1, 1, 1)
        hidden = {HIDDEN_MASK: hidden_BCHW.repeat(times)}
        return (joined(noisy_BCHW, hidden, seen_BCHW.to(noisy_BCHW.dtype).repeat(times)), *rest), kwargs

    handle = unet.register_forward_pre_hook(join, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
