"""The forward pass of ``ZImageTransformer2DModel`` for batches of fixed shape.

diffusers' own forward takes a list of captions without padding, so the host has to know their lengths. In this module,
masks on the device represent the lengths, so a pass does not synchronise and can be captured as a graph. The result is
the same.

Dimensions: B batch, C channels, H W latent height and width, I image tokens, S caption tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.families.base import Tensors
from lora_rocm.families.common.caption_lm import OWN, REAL, STATES

PATCH = 2
CAPTION_MULTIPLE = 32  # the model pads captions and images to this multiple with learned tokens, and reads them
SIZES = f"{PATCH}-1"  # key of the layers for this patch and one frame


def predicted(transformer: Any, latents_BCHW: Tensor, time_B: Tensor, batch: Tensors) -> Tensor:
    """Return the model's output [B, C, H, W].

    Args:
        transformer: a ``ZImageTransformer2DModel``.
        latents_BCHW: noisy latents in the model's dtype.
        time_B: float32, 0 noise .. 1 image.
        batch: the caption's tensors; S is a multiple of ``CAPTION_MULTIPLE``.
    """
    rows, channels, height, width = latents_BCHW.shape
    high, wide = height // PATCH, width // PATCH
    real_BS, own_BS = batch[REAL], batch.get(OWN)
    # the modulation, and the embedded tokens with their padding
    modulation_BD = transformer.t_embedder(time_B * transformer.t_scale).type_as(latents_BCHW)
    split = latents_BCHW.reshape(rows, channels, high, PATCH, wide, PATCH).permute(0, 2, 4, 3, 5, 1)
    image_BID = transformer.all_x_embedder[SIZES](split.reshape(rows, high * wide, PATCH**2 * channels))
    fill = -(high * wide) % CAPTION_MULTIPLE
    image_BID = torch.cat([image_BID, transformer.x_pad_token.to(image_BID.dtype).expand(rows, fill, -1)], dim=1)
    text_BSD = transformer.cap_embedder(batch[STATES].to(latents_BCHW.dtype))
    text_BSD = torch.where(real_BS[..., None], text_BSD, transformer.cap_pad_token.to(text_BSD.dtype))
    # positions: the caption's tokens count from 1 on the first axis, and the image follows them
    turn_image, turn_text = _places(transformer, real_BS, own_BS, high, wide, fill)
    # the refiners of image and caption, then all layers on both
    for block in transformer.noise_refiner:
        image_BID = _run(transformer, block, image_BID, None, turn_image, modulation_BD)
    for block in transformer.context_refiner:
        text_BSD = _run(transformer, block, text_BSD, own_BS, turn_text)
    x = torch.cat([image_BID, text_BSD], dim=1)
    mask = None if own_BS is None else torch.cat([own_BS.new_ones(rows, image_BID.shape[1]), own_BS], dim=1)
    turn = torch.cat([turn_image, turn_text], dim=1)
    for block in transformer.layers:
        x = _run(transformer, block, x, mask, turn, modulation_BD)
    # the image tokens back to latents
    output = transformer.all_final_layer[SIZES](x[:, : high * wide], c=modulation_BD)
    output = output.reshape(rows, high, wide, PATCH, PATCH, channels).permute(0, 5, 1, 3, 2, 4)
    result: Tensor = output.reshape(latents_BCHW.shape)
    return result


def _places(
    transformer: Any, real_BS: Tensor, own_BS: Tensor | None, high: int, wide: int, fill: int
) -> tuple[Tensor, Tensor]:
    """Return rotations of image and caption tokens, complex64 [B, I, D/2] and [B, S, D/2].

    Padding of the image has position 0.
    """
    rows, length = real_BS.shape
    device = real_BS.device
    count_B = torch.full((rows,), length, device=device) if own_BS is None else own_BS.sum(dim=1)
    text_S3 = torch.zeros(length, 3, dtype=torch.int64, device=device)
    text_S3[:, 0] = torch.arange(1, length + 1, device=device)
    grid_I3 = torch.zeros(high, wide, 3, dtype=torch.int64, device=device)
    grid_I3[..., 1] = torch.arange(high, device=device)[:, None]
    grid_I3[..., 2] = torch.arange(wide, device=device)
    image_BI3 = grid_I3.flatten(0, 1).repeat(rows, 1, 1)
    image_BI3[..., 0] = count_B[:, None] + 1
    image_BI3 = nn.functional.pad(image_BI3, (0, 0, 0, fill))
    return _rotations(transformer, image_BI3), _rotations(transformer, text_S3).expand(rows, -1, -1)


def _rotations(transformer: Any, places: Tensor) -> Tensor:
    """Return the rotary embedding of integer positions [..., 3], complex64 [..., D/2].

    It is computed directly, without the model's table.
    """
    parts = []
    for axis, width in enumerate(transformer.axes_dims):
        steps = torch.arange(0, width, 2, dtype=torch.float64, device=places.device) / width
        parts.append(places[..., axis, None] * transformer.rope_theta**-steps)
    angles = torch.cat(parts, dim=-1).float()
    return torch.polar(torch.ones_like(angles), angles)


def _run(transformer: Any, block: nn.Module, *args: Tensor | None) -> Tensor:
    """Return a block's output. It is recomputed in the backward pass if gradient checkpointing is enabled."""
    recomputed = torch.is_grad_enabled() and transformer.gradient_checkpointing
    output: Tensor = transformer._gradient_checkpointing_func(block, *args) if recomputed else block(*args)
    return output
