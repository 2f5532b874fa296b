"""Fused blocks of Cosmos-Predict2, used by Anima: modulated LayerNorms, gated branches, cross-attention to text.

In float16 the residual stream is float32 from the first block to the last norm.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GELU
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_cosmos import (
    CosmosAdaLayerNorm,
    CosmosAttnProcessor2_0,
    CosmosTransformerBlock,
)
from torch import Tensor, nn

from lora_rocm.families.common.dit.blocks.attention import TurnedAttention, attended, fuse_blocks
from lora_rocm.families.common.dit.blocks.gelu import FusedGelu
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.made_again import made_again
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm, normal_again, residual_stream
from lora_rocm.kernels.rotary import Rotation


def fuse(transformer: nn.Module, implementation: Implementation) -> None:
    """Fuse Cosmos-Predict2's blocks (see ``fuse_blocks``)."""
    classes = {CosmosTransformerBlock: FusedCosmosBlock, CosmosAdaLayerNorm: FusedCosmosFinalNorm, GELU: FusedGelu}
    fuse_blocks(transformer, implementation, classes, {"attn1": CosmosSelfAttention, "attn2": CrossAttention})


class CosmosSelfAttention(TurnedAttention):
    """The processor of self-attention."""

    library = CosmosAttnProcessor2_0

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if encoder_hidden_states is not None or image_rotary_emb is None:
            output: Tensor = CosmosAttnProcessor2_0()(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return output
        cos, sin = (turn.chunk(2, dim=1)[0] for turn in image_rotary_emb)  # each number is in the table twice
        return self.of_one(attn, hidden_states, Rotation(cos, sin, interleaved=False), attention_mask)


class CrossAttention(TurnedAttention):
    """The processor of cross-attention to the text, with one product for keys and values."""

    library = CosmosAttnProcessor2_0

    def __init__(self, attention: Attention) -> None:
        self.merged = MergedLinears.of(attention.to_k, attention.to_v)

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        layers, text_BSD = [attn.to_k, attn.to_v], encoder_hidden_states
        text = [layer(text_BSD) for layer in layers] if self.merged is None else self.merged(layers, text_BSD)
        query, key, value = (x.unflatten(-1, (attn.heads, -1)) for x in (attn.to_q(hidden_states), *text))
        turned_q = self.turned([query], [attn.norm_q], Rotation.none(query))
        turned_k = self.turned([key], [attn.norm_k], Rotation.none(key))
        mixed = attended(turned_q, turned_k, (value, value.detach), attention_mask)
        output: Tensor = attn.to_out[1](attn.to_out[0](mixed))
        return output


class FusedCosmosBlock(CosmosTransformerBlock):
    """A block with residual sums fused with the following norms."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        return module.before_proj is None and module.after_proj is None

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Any,
        embedded_timestep: Tensor,
        temb: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        extra_pos_emb: Tensor | None = None,
        attention_mask: Any = None,
        controlnet_residual: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if embedded_timestep.ndim != 2 or controlnet_residual is not None or extra_pos_emb is not None or kwargs:
            output: Tensor = super().forward(
                hidden_states,
                encoder_hidden_states,
                embedded_timestep,
                temb,
                image_rotary_emb,
                extra_pos_emb,
                attention_mask,
                controlnet_residual,
                **kwargs,
            )
            return output
        (norm_1, gate_1), (norm_2, gate_2), (norm_3, gate_3) = (
            _modulated(norm, embedded_timestep, temb) for norm in (self.norm1, self.norm2, self.norm3)
        )
        x, normal = add_norm(residual_stream(hidden_states), None, norm_1, self.implementation)
        with made_again((normal, normal_again(x, norm_1, self.implementation))):
            y = self.attn1(normal, image_rotary_emb=image_rotary_emb)
        x, normal = add_norm(x, Branch(y, gate_1), norm_2, self.implementation)
        with made_again((normal, normal_again(x, norm_2, self.implementation))):
            y = self.attn2(normal, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)
        x, normal = add_norm(x, Branch(y, gate_2), norm_3, self.implementation)
        return add_branch(x, Branch(self.ff(normal), gate_3), self.implementation)


class FusedCosmosFinalNorm(CosmosAdaLayerNorm):
    """The norm after the blocks; its output has the dtype of its weights."""

    implementation: Implementation

    def forward(self, hidden_states: Tensor, embedded_timestep: Tensor, temb: Tensor | None = None) -> Tensor:
        rows = self.linear_2(self.linear_1(self.activation(embedded_timestep)))
        shift, scale = (rows if temb is None else rows + temb[..., : rows.shape[-1]]).chunk(2, dim=-1)
        norm = RowNorm(1 + scale, shift, self.norm.eps, centred=True)
        return add_norm(hidden_states, None, norm, self.implementation)[1]


def _modulated(norm: Any, time_BD: Tensor, temb_BD: Tensor | None) -> tuple[RowNorm, Tensor]:
    """Return the norm with its modulation, and the gate of the norm's branch."""
    rows = norm.linear_2(norm.linear_1(norm.activation(time_BD)))
    shift, scale, gate = (rows if temb_BD is None else rows + temb_BD).chunk(3, dim=1)
    return RowNorm(1 + scale, shift, norm.norm.eps, centred=True), gate
