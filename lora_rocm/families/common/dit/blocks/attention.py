"""Attention with normalised and rotated queries and keys, over one stream of tokens or two that are joined.

Dimensions: B batch, S tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_rocm.families.common.adopt import adopt_all
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.made_again import Made, made, made_again
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.rotary import Rotation, norm_rotary


class Stream:
    """Projections and norms of one stream of tokens.

    names: of the attention's layers for queries, keys and values, and of the norms of queries and keys.
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


class TurnedAttention:
    """The common part of attention processors with one product for query, key and value of each stream.

    library: the processor of diffusers that this one replaces.
    """

    library: ClassVar[type[Any]]
    implementation: Implementation

    def __init__(self, attention: Any) -> None:
        self.streams = [Stream(attention, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))]

    def of_streams(self, attention: Any, inputs: Sequence[Tensor], rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Attention over the concatenated tokens of all streams: [B, S, H * D], before the output projection.

        Args:
            attention: has the layers that the streams name.
            inputs: the tokens of each stream, [B, S, inputs].
            rotation: of the tokens of all streams.
            mask: [B, S], true for keys that count, or any mask that PyTorch's attention accepts.
        """
        pairs = zip(self.streams, inputs, strict=True)
        queries, keys, values = zip(
            *(stream.projected(attention, x, attention.heads) for stream, x in pairs), strict=True
        )
        norm_q, norm_k = zip(*(stream.norms(attention) for stream in self.streams), strict=True)
        turned_q, turned_k = self.turned(queries, norm_q, rotation), self.turned(keys, norm_k, rotation)
        return attended(turned_q, turned_k, made(_joined, values), mask)

    def turned(self, heads: Sequence[Tensor], norms: Sequence[Any], rotation: Rotation) -> Made:
        """Queries or keys of streams, [B, S, H, D] each, after joining, normalisation and rotation."""

        def turn(given: Sequence[Tensor]) -> Tensor:
            return norm_rotary([*zip(given, weights, strict=True)], norms[0].eps, rotation, self.implementation)

        weights = [norm.weight for norm in norms]
        return made(turn, heads)

    def of_one(self, attention: Any, x_BSD: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """The output of an attention with one stream."""
        mixed = self.of_streams(attention, [x_BSD], rotation, mask)
        for layer in attention.to_out:
            mixed = layer(mixed)
        return mixed


def attended(query: Made, key: Made, value: Made, mask: Tensor | None) -> Tensor:
    """Attention without the output projection: [B, S, H * D]. Its inputs, [B, S, H, D], are recomputed, not kept."""
    mask = mask[:, None, None] if mask is not None and mask.ndim == 2 else mask
    q, k, v = (tensor.transpose(1, 2) for tensor, _ in (query, key, value))
    with made_again(query, key, value):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def _joined(tokens: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tokens], dim=1) if len(tokens) > 1 else tokens[0]


def fuse_blocks(
    transformer: nn.Module,
    implementation: Implementation,
    classes: Mapping[type[nn.Module], Any],
    attentions: Mapping[str, type[TurnedAttention]],
) -> None:
    """Fuse the blocks and their attention modules with these names. A second call changes the kernel backend.

    Call it after LoRA is injected and the weights are on their device.
    """
    adopt_all(transformer, classes)
    fused: list[Any] = [module for module in transformer.modules() if isinstance(module, tuple(classes.values()))]
    for module in fused:
        module.implementation = implementation
        for name, processor in attentions.items():
            layer = getattr(module, name, None)
            if layer is not None and type(layer.processor) is processor.library:
                layer.set_processor(processor(layer))
            if layer is not None and isinstance(layer.processor, processor):
                layer.processor.implementation = implementation
