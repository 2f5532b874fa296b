"""Fused blocks of Z-Image: RMSNorms before and after each branch, modulation without a shift, and SwiGLU.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_z_image import (
    FeedForward,
    ZImageTransformerBlock,
    ZSingleStreamAttnProcessor,
)
from torch import Tensor, nn

from lora_rocm.families.common.dit.blocks.attention import TurnedAttention, fuse_blocks
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.gated import gated
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm
from lora_rocm.kernels.rotary import Rotation


def fuse(transformer: nn.Module, implementation: Implementation) -> None:
    """Fuse Z-Image's blocks (see ``fuse_blocks``)."""
    classes = {ZImageTransformerBlock: FusedZImageBlock, FeedForward: FusedFeedForward}
    fuse_blocks(transformer, implementation, classes, {"attention": ZImageSelfAttention})
    for module in transformer.modules():
        if isinstance(module, FusedFeedForward) and not hasattr(module, "merged"):
            module.merged = MergedLinears.of(module.w1, module.w3)


class ZImageSelfAttention(TurnedAttention):
    """The attention processor."""

    library = ZSingleStreamAttnProcessor

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        if freqs_cis is None:
            output: Tensor = ZSingleStreamAttnProcessor()(attn, hidden_states, encoder_hidden_states, attention_mask)
            return output
        turn = Rotation(freqs_cis.real, freqs_cis.imag, interleaved=True)
        return self.of_one(attn, hidden_states, turn, attention_mask)


class FusedFeedForward(FeedForward):
    """SwiGLU. If both gate and value layer have a LoRA, their projections are one matrix product."""

    implementation: Implementation
    merged: MergedLinears | None

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.w1, self.w3)
        gate, value = [layer(x) for layer in layers] if self.merged is None else self.merged(layers, x)
        output: Tensor = self.w2(gated("silu", self.implementation, value, gate))
        return output


class FusedZImageBlock(ZImageTransformerBlock):
    """A block with residual sums that are fused with the norms before and after them."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        norms = (module.attention_norm1, module.ffn_norm1, module.attention_norm2, module.ffn_norm2)
        plain = all(type(norm) is RMSNorm and norm.weight is not None and norm.bias is None for norm in norms)
        return plain and module.attention.norm_q is not None

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        freqs_cis: Tensor,
        adaln_input: Tensor | None = None,
        noise_mask: Tensor | None = None,
        adaln_noisy: Tensor | None = None,
        adaln_clean: Tensor | None = None,
    ) -> Tensor:
        if noise_mask is not None:
            output: Tensor = super().forward(x, attn_mask, freqs_cis, adaln_input, noise_mask, adaln_noisy, adaln_clean)
            return output
        scale_1 = gate_1 = scale_2 = gate_2 = None
        if self.modulation:
            scale_1, gate_1, scale_2, gate_2 = self.adaLN_modulation(adaln_input).chunk(4, dim=1)
        x, normal = add_norm(x, None, _norm(self.attention_norm1, scale_1), self.implementation)
        y = self.attention(normal, attention_mask=attn_mask, freqs_cis=freqs_cis)
        x, normal = add_norm(
            x, _branch(y, self.attention_norm2, gate_1), _norm(self.ffn_norm1, scale_2), self.implementation
        )
        return add_branch(x, _branch(self.feed_forward(normal), self.ffn_norm2, gate_2), self.implementation)


def _norm(norm: Any, scale_BD: Tensor | None) -> RowNorm:
    weight = norm.weight if scale_BD is None else torch.addcmul(norm.weight, norm.weight, scale_BD)
    return RowNorm(weight, None, norm.eps)


def _branch(y_BSD: Tensor, norm: Any, gate_BD: Tensor | None) -> Branch:
    return Branch(y_BSD, norm.weight if gate_BD is None else gate_BD.tanh() * norm.weight, norm.eps)
