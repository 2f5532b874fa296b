"""The blocks of FLUX.1: modulated LayerNorms, gated branches, text and image in streams of their own and then in one.

In float16 the residual streams are float32 from the first block to the last norm.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from lora_rocm.families.transformer_blocks.attention import Stream, TurnedAttention, fuse_blocks
from lora_rocm.kernels.backend import Form
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm, residual_stream
from lora_rocm.kernels.rotary import Rotation

Turns = tuple[Tensor, Tensor]


def fuse(transformer: nn.Module, form: Form) -> None:
    """As ``fuse_blocks``."""
    classes = {FluxTransformerBlock: FusedDoubleBlock, FluxSingleTransformerBlock: FusedSingleBlock}
    classes[AdaLayerNormContinuous] = FusedFinalNorm
    fuse_blocks(transformer, form, classes, "attn", JointAttention)


class JointAttention(TurnedAttention):
    """The attention processor, of one stream or two."""

    library = FluxAttnProcessor

    def __init__(self, attention: FluxAttention) -> None:
        super().__init__(attention)
        if attention.added_kv_proj_dim is not None:
            names = ("add_q_proj", "add_k_proj", "add_v_proj")
            self.streams.insert(0, Stream(attention, names, ("norm_added_q", "norm_added_k")))

    def __call__(
        self,
        attn: FluxAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Turns | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if image_rotary_emb is None or attn.fused_projections:
            output: Tensor | tuple[Tensor, Tensor] = FluxAttnProcessor()(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
            return output
        cos, sin = (turn[:, ::2] for turn in image_rotary_emb)  # each number stands there twice
        inputs = [hidden_states] if encoder_hidden_states is None else [encoder_hidden_states, hidden_states]
        mixed = self.of_streams(attn, inputs, Rotation(cos, sin, interleaved=True), attention_mask)
        if encoder_hidden_states is None:
            return mixed
        text, image = mixed.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class FusedDoubleBlock(FluxTransformerBlock):
    """A block of two streams, whose residual sums are computed with the norms after them."""

    form: Form

    @staticmethod
    def fits(module: Any) -> bool:
        return True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Turns | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if joint_attention_kwargs:
            outputs: tuple[Tensor, Tensor] = super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
            return outputs
        x, image = self._started(self.norm1, residual_stream(hidden_states), temb)
        text_x, text = self._started(self.norm1_context, residual_stream(encoder_hidden_states), temb)
        y, text_y = self.attn(hidden_states=x[1], encoder_hidden_states=text_x[1], image_rotary_emb=image_rotary_emb)
        image_out = self._ended(x[0], y, image, self.norm2, self.ff)
        text_out = self._ended(text_x[0], text_y, text, self.norm2_context, self.ff_context)
        return text_out, image_out

    def _started(self, norm: Any, x_BSD: Tensor, temb_BD: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        """((tokens, tokens normed for attention), the gates and the modulation that are left)."""
        shift, scale, *rest = norm.linear(norm.silu(temb_BD)).chunk(6, dim=1)
        return add_norm(x_BSD, None, _modulated(norm.norm, scale, shift), self.form), tuple(rest)

    def _ended(self, x_BSD: Tensor, y_BSD: Tensor, rows_BD: tuple[Tensor, ...], norm: Any, mlp: nn.Module) -> Tensor:
        """Add what attention gave, then what the feed-forward layer gives."""
        gate, shift, scale, mlp_gate = rows_BD
        x_BSD, normal = add_norm(x_BSD, Branch(y_BSD, gate), _modulated(norm, scale, shift), self.form)
        return add_branch(x_BSD, Branch(mlp(normal), mlp_gate), self.form)


class FusedSingleBlock(FluxSingleTransformerBlock):
    """A block of one stream, whose norm is computed with its modulation."""

    form: Form

    @staticmethod
    def fits(module: Any) -> bool:
        return True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Turns | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if joint_attention_kwargs:
            outputs: tuple[Tensor, Tensor] = super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
            return outputs
        tokens = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
        shift, scale, gate = self.norm.linear(self.norm.silu(temb)).chunk(3, dim=1)
        joined = residual_stream(torch.cat([encoder_hidden_states, hidden_states], dim=1))
        x, normal = add_norm(joined, None, _modulated(self.norm.norm, scale, shift), self.form)
        active = self.act_mlp(self.proj_mlp(normal))
        y = self.attn(hidden_states=normal, image_rotary_emb=image_rotary_emb)
        x = add_branch(x, Branch(self.proj_out(torch.cat([y, active], dim=2)), gate), self.form)
        text, image = x.split(tokens, dim=1)
        return text, image


class FusedFinalNorm(AdaLayerNormContinuous):
    """The norm after the blocks, whose output has the dtype of its weights."""

    form: Form

    @staticmethod
    def fits(module: Any) -> bool:
        return isinstance(module.norm, nn.LayerNorm) and not module.norm.elementwise_affine

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding)).chunk(2, dim=1)
        return add_norm(x, None, _modulated(self.norm, scale, shift), self.form)[1]


def _modulated(norm: Any, scale_BD: Tensor, shift_BD: Tensor) -> RowNorm:
    return RowNorm(1 + scale_BD, shift_BD, norm.eps, centred=True)
