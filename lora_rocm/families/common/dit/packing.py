"""Converts latents to tokens and back: squares of 2 x 2 become one token, with a position on a grid.

Dimensions: B batch, C channels, H W latent height and width, I image tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

PATCH = 2


def packed(latents_BCHW: Tensor) -> Tensor:
    """Return latents as tokens [B, I, 4 C]. A token has its channels in order, each with four latents."""
    rows, channels, height, width = latents_BCHW.shape
    split = latents_BCHW.reshape(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return split.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpacked(tokens_BID: Tensor, height: int, width: int) -> Tensor:
    """Return latents [B, C, H, W] from tokens, as the inverse of ``packed``."""
    split = tokens_BID.reshape(len(tokens_BID), height // PATCH, width // PATCH, -1, PATCH, PATCH)
    return split.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def places(high: int, wide: int, device: torch.device, number: int = 0) -> Tensor:
    """Return the positions (number, row, column) of a grid of tokens: float32 [I, 3], on the device."""
    grid = torch.full((high, wide, 3), float(number), device=device)
    grid[..., 1] = torch.arange(high, device=device)[:, None]
    grid[..., 2] = torch.arange(wide, device=device)
    return grid.flatten(0, 1)
