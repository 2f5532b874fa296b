"""Attention with normalised and rotated queries and keys, over one stream of tokens or two concatenated streams.

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

    names: names of the attention's layers for queries, keys and values. norms: names of the norms of queries and keys.
    """

    def __init__(self, attention: nn.Module, names: Sequence[str], norms: Sequence[str]) -> None:
        self._names, self._norms = names, norms
        self._merged = MergedLinears.of(*self._layers(attention))

    def projected(self, attention: nn.Module, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Return (queries, keys, values), each of shape [B, S, H, D]."""
        layers = self._layers(attention)
        given = [layer(x) for layer in layers] if self._merged is None else self._merged(layers, x)
        return tuple(tensor.unflatten(-1, (heads, -1)) for tensor in given)

    def norms(self, attention: nn.Module) -> list[Any]:
        """Return the norms of queries and of keys."""
        return [getattr(attention, name) for name in self._norms]

    def _layers(self, attention: nn.Module) -> list[nn.Module]:
        return [getattr(attention, name) for name in self._names]


class TurnedAttention:
    """Base class of attention processors that compute each stream's query, key and value in one matrix product.

    library: the diffusers processor that this one replaces.
    """

    library: ClassVar[type[Any]]
    implementation: Implementation

    def __init__(self, attention: Any) -> None:
        self.streams = [Stream(attention, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))]

    def of_streams(self, attention: Any, inputs: Sequence[Tensor], rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Compute attention over the concatenated tokens of all streams, without the output projection: [B, S, H * D].

        Args:
            attention: the module with the layers that the streams name.
            inputs: the tokens of each stream, [B, S, inputs].
            rotation: rotary embedding of all streams' tokens.
            mask: [B, S] with True for keys to attend to, or any mask that PyTorch's attention accepts.
        """
        pairs = zip(self.streams, inputs, strict=True)
        queries, keys, values = zip(
            *(stream.projected(attention, x, attention.heads) for stream, x in pairs), strict=True
        )
        norm_q, norm_k = zip(*(stream.norms(attention) for stream in self.streams), strict=True)
        turned_q, turned_k = self.turned(queries, norm_q, rotation), self.turned(keys, norm_k, rotation)
        return attended(turned_q, turned_k, made(_joined, values), mask)

    def turned(self, heads: Sequence[Tensor], norms: Sequence[Any], rotation: Rotation) -> Made:
        """Concatenate the streams' queries or keys, each [B, S, H, D], then normalise and rotate them."""

        def turn(given: Sequence[Tensor]) -> Tensor:
            return norm_rotary([*zip(given, weights, strict=True)], norms[0].eps, rotation, self.implementation)

        weights = [norm.weight for norm in norms]
        return made(turn, heads)

    def of_one(self, attention: Any, x_BSD: Tensor, rotation: Rotation, mask: Tensor | None) -> Tensor:
        """Return the output of an attention with one stream, including the output projection."""
        mixed = self.of_streams(attention, [x_BSD], rotation, mask)
        for layer in attention.to_out:
            mixed = layer(mixed)
        return mixed


def attended(query: Made, key: Made, value: Made, mask: Tensor | None) -> Tensor:
    """Compute attention without the output projection: [B, S, H * D].

    Its inputs, each [B, S, H, D], are not kept for the backward pass but recomputed.
    """
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
    """Fuse blocks and their attention modules. A second call changes the kernel backend.

    Call it after LoRA is injected and the weights are on their device.

    Args:
        transformer: the model.
        implementation: the kernel backend.
        classes: the fused class for each class of modules.
        attentions: the attention processor for each name of a block's attention module.
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
