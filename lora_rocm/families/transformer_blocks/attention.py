"""Attention whose queries and keys are normed and turned, over one stream of tokens or two that are joined.

Dimensions: B batch, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_rocm.kernels.backend import Form
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.rotary import Rotation, norm_rotary


class Stream:
    """Projections and norms of one stream of tokens.

    names: of the attention's layers that make queries, keys and values, and of the norms of queries and keys.
    """

    def __init__(self, attention: nn.Module, names: Sequence[str], norms: Sequence[str]) -> None:
        self._names, self._norms = names, norms
        self._merged = MergedLinears.of(*self._layers(attention))

    def projected(self, attention: nn.Module, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        """(queries, keys, values), each [B, S, H, D]."""
        layers = self._layers(attention)
        given = [layer(x) for layer in layers] if self._merged is None else self._merged(layers, x)
        return tuple(tensor.unflatten(-1, (heads, -1)) for tensor in given)

    def norms(self, attention: nn.Module) -> list[Any]:
        """The norms of queries and of keys."""
        return [getattr(attention, name) for name in self._norms]

    def _layers(self, attention: nn.Module) -> list[nn.Module]:
        return [getattr(attention, name) for name in self._names]


def attended(
    attention: nn.Module,
    streams: Sequence[tuple[Stream, Tensor]],
    heads: int,
    rotation: Rotation,
    form: Form,
    mask: Tensor | None = None,
) -> Tensor:
    """What the tokens of all streams, one after the other, see: [B, S, H * D], before the projection of the output.

    Args:
        attention: has the layers that the streams name.
        streams: each with its tokens, [B, S, inputs].
        heads: H.
        rotation: of the tokens of all streams.
        form: see ``backend``.
        mask: [B, S] of keys that count, or anything that PyTorch's attention takes.
    """
    queries, keys, values = zip(*(stream.projected(attention, x, heads) for stream, x in streams), strict=True)
    norms = [stream.norms(attention) for stream, _ in streams]
    query, key = (
        norm_rotary(
            [(x, both[number].weight) for x, both in zip(given, norms, strict=True)],
            norms[0][number].eps,
            rotation,
            form,
        ).transpose(1, 2)
        for number, given in enumerate((queries, keys))
    )
    value = torch.cat(values, dim=1) if len(values) > 1 else values[0]
    mask = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
    return F.scaled_dot_product_attention(query, key, value.transpose(1, 2), attn_mask=mask).transpose(1, 2).flatten(2)
