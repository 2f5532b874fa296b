"""Fused blocks of FLUX.1: modulated LayerNorms and gated branches; text and image in two streams, then in one.

In float16 the residual streams are float32 from the first block to the last norm.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from torch import Tensor, nn

from lora_rocm.families.common.dit.blocks.attention import Stream, TurnedAttention, fuse_blocks
from lora_rocm.families.common.dit.blocks.gelu import FusedGelu
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.gated import activated
from lora_rocm.kernels.made_again import Made, made, made_again
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm, normal_again, residual_stream
from lora_rocm.kernels.packed_gradient import with_packed_gradient
from lora_rocm.kernels.rotary import Rotation

Turns = tuple[Tensor, Tensor]


def fuse(transformer: nn.Module, implementation: Implementation) -> None:
    """Fuse FLUX.1's blocks (see ``fuse_blocks``)."""
    classes = {FluxTransformerBlock: FusedDoubleBlock, FluxSingleTransformerBlock: FusedSingleBlock}
    classes |= {AdaLayerNormContinuous: FusedFluxFinalNorm, GELU: FusedGelu}
    fuse_blocks(transformer, implementation, classes, {"attn": JointAttention})


class JointAttention(TurnedAttention):
    """The attention processor for blocks of one stream or two."""

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
        cos, sin = (turn[:, ::2] for turn in image_rotary_emb)  # each number is in the table twice
        inputs = [hidden_states] if encoder_hidden_states is None else [encoder_hidden_states, hidden_states]
        mixed = self.of_streams(attn, inputs, Rotation(cos, sin, interleaved=True), attention_mask)
        if encoder_hidden_states is None:
            return mixed
        text, image = mixed.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


class FusedDoubleBlock(FluxTransformerBlock):
    """A block with two streams. Residual sums are fused with the norms that follow."""

    implementation: Implementation

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
        x, normal, image = self._started(self.norm1, residual_stream(hidden_states), temb)
        text_x, text_normal, text = self._started(self.norm1_context, residual_stream(encoder_hidden_states), temb)
        with made_again(normal, text_normal):
            y, text_y = self.attn(
                hidden_states=normal[0], encoder_hidden_states=text_normal[0], image_rotary_emb=image_rotary_emb
            )
        text_out = self._ended(text_x, text_y, text, self.norm2_context, self.ff_context)
        image_out = self._ended(x, y, image, self.norm2, self.ff)  # last: recomputation stops before its last product
        return text_out, image_out

    def _started(self, norm: Any, x_BSD: Tensor, temb_BD: Tensor) -> tuple[Tensor, Made, tuple[Tensor, ...]]:
        """Return tokens, tokens normalised for attention, and the remaining gates and modulation."""
        shift, scale, *rest = norm.linear(norm.silu(temb_BD)).chunk(6, dim=1)
        rows = _modulated(norm.norm, scale, shift)
        x_BSD, normal = add_norm(x_BSD, None, rows, self.implementation)
        return x_BSD, (normal, normal_again(x_BSD, rows, self.implementation)), tuple(rest)

    def _ended(self, x_BSD: Tensor, y_BSD: Tensor, rows_BD: tuple[Tensor, ...], norm: Any, mlp: nn.Module) -> Tensor:
        """Return the stream after adding the output of attention and then the feed-forward output."""
        gate, shift, scale, mlp_gate = rows_BD
        x_BSD, normal = add_norm(x_BSD, Branch(y_BSD, gate), _modulated(norm, scale, shift), self.implementation)
        return add_branch(x_BSD, Branch(mlp(normal), mlp_gate), self.implementation)


class FusedSingleBlock(FluxSingleTransformerBlock):
    """A block with one stream. The norm is fused with its modulation."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        return isinstance(module.act_mlp, nn.GELU) and module.act_mlp.approximate == "tanh"

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
        joined = residual_stream(_joined(encoder_hidden_states, hidden_states))
        rows = _modulated(self.norm.norm, scale, shift)
        x, normal = add_norm(joined, None, rows, self.implementation)
        with made_again((normal, normal_again(x, rows, self.implementation))):
            y = self.attn(hidden_states=normal, image_rotary_emb=image_rotary_emb)
            inner = self.proj_mlp(normal)  # last: its gradient is freed before attention's backward pass needs memory
        x = add_branch(x, Branch(self._out(y, inner), gate), self.implementation)
        text, image = x.split(tokens, dim=1)
        return text, image

    def _out(self, y_BSD: Tensor, inner_BSN: Tensor) -> Tensor:
        """Return the projection of the concatenated outputs of attention and the feed-forward layer."""
        if type(self.proj_out) is nn.Linear:  # two products, so that neither inputs nor gradients are concatenated
            weight_y, weight = self.proj_out.weight.split([y_BSD.shape[2], inner_BSN.shape[2]], dim=1)
            of_y = F.linear(y_BSD, weight_y, self.proj_out.bias).flatten(0, 1)
            return of_y.addmm(activated("gelu-tanh", self.implementation, inner_BSN).flatten(0, 1), weight.t()).view_as(
                y_BSD
            )
        y_BSD = with_packed_gradient(y_BSD)
        joined, again = made(lambda given: torch.cat([given[0], self.act_mlp(given[1])], dim=2), [y_BSD, inner_BSN])
        with made_again((joined, again)):
            output: Tensor = self.proj_out(joined)
        return output


class FusedFluxFinalNorm(AdaLayerNormContinuous):
    """The norm after the blocks. Its output has the dtype of its weights."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        return isinstance(module.norm, nn.LayerNorm) and not module.norm.elementwise_affine

    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding)).chunk(2, dim=1)
        return add_norm(x, None, _modulated(self.norm, scale, shift), self.implementation)[1]


def _joined(text_BSD: Tensor, image_BSD: Tensor) -> Tensor:
    """Return the tokens of text and image, concatenated. They are not copied if they are parts of one tensor."""
    parts = (text_BSD, image_BSD)
    whole = None if torch.compiler.is_compiling() else image_BSD._base
    if whole is not None and whole is text_BSD._base and whole.ndim == 3:
        tracked = whole.requires_grad and torch.is_grad_enabled()  # recomputed blocks restart from their inputs
        tokens = [part.shape[1] for part in parts]
        if whole.shape[1] == sum(tokens) and all((part.grad_fn is not None) is tracked for part in parts):
            pairs = zip(whole.split(tokens, dim=1), parts, strict=True)
            if all(_place(found) == _place(part) for found, part in pairs):
                return whole
    return torch.cat(parts, dim=1)


def _place(view: Tensor) -> tuple[object, ...]:
    return view.storage_offset(), view.shape, view.stride()


def _modulated(norm: Any, scale_BD: Tensor, shift_BD: Tensor) -> RowNorm:
    return RowNorm(1 + scale_BD, shift_BD, norm.eps, centred=True)
