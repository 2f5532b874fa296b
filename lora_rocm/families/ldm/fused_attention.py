"""Attention of a UNet with one matrix product for query, key and value of the same input. See ``fused_unet``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from lora_rocm.families.ldm.fusion_options import Fusion
from lora_rocm.kernels.lora_layer import base_of
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.weight_format import PackedLinear


def merge_projections(attention: Attention, how: Fusion) -> None:
    """Give an attention layer a ``MergedProjections`` if ``how`` asks for it and the layer is a plain one."""
    if how.projections and type(attention.processor) is AttnProcessor2_0 and _is_plain_attention(attention):
        attention.set_processor(MergedProjections(attention))
    if isinstance(attention.processor, MergedProjections):
        attention.processor.how = how


class MergedProjections:
    """An attention processor that computes the projections of one input by one product.

    In self-attention these are query, key and value; in cross-attention key and value of the text.
    """

    how: Fusion

    def __init__(self, attention: Attention) -> None:
        self.is_cross = attention.is_cross_attention
        self.plain = AttnProcessor2_0()
        self.merged = MergedLinears(self._layers(attention))

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        if (
            attention_mask is not None
            or hidden_states.ndim != 3
            or self.is_cross != (encoder_hidden_states is not None)
        ):
            output: Tensor = self.plain(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
            return output
        if encoder_hidden_states is None:
            query, key, value = self._project(attn, hidden_states)
        else:
            query = attn.to_q(hidden_states)
            key, value = self._project(attn, encoder_hidden_states)
        batch, heads = len(query), attn.heads
        query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = attn.to_out[1](attn.to_out[0](mixed.transpose(1, 2).reshape(batch, -1, heads * query.shape[-1])))
        return out

    def _layers(self, attention: Attention) -> list[Any]:
        both = [attention.to_k, attention.to_v]
        return both if self.is_cross else [attention.to_q, *both]

    def _project(self, attention: Attention, x: Tensor) -> tuple[Tensor, ...]:
        layers = self._layers(attention)
        if not self.how.projections:
            return tuple(layer(x) for layer in layers)
        return self.merged(layers, x, self.how.join)


def _is_plain_attention(attention: Attention) -> bool:
    unusual = (attention.spatial_norm, attention.group_norm, attention.norm_q, attention.norm_k, attention.norm_cross)
    bases = [base_of(layer) for layer in (attention.to_q, attention.to_k, attention.to_v)]
    kinds = {type(base) for base in bases}
    linear = kinds in ({nn.Linear}, {PackedLinear}) and all(base.bias is None for base in bases)
    plain = not attention.residual_connection and attention.rescale_output_factor == 1
    return linear and plain and all(part is None for part in unusual)
