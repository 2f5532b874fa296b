"""A fused UNet: the same modules and names with less memory traffic, computed by ``lora_rocm.kernels``.

In unusual cases (masks, dropout, other or trained norms, disabled adapters), a fused module calls diffusers' own code.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import CrossAttnUpBlock2D, UpBlock2D
from torch import Tensor, nn

from lora_rocm.families.common.adopt import adopt, adopt_all
from lora_rocm.families.common.recompute import Recomputing, Run
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.frozen_conv import FrozenConv2d
from lora_rocm.kernels.gated import gated, geglu_of
from lora_rocm.kernels.lora_layer import base_of
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.norms import add_layer_norm, group_norm, residual
from lora_rocm.kernels.weight_format import PackedLinear

SEGMENT_LENGTH = 3
"""Number of transformer blocks that are recomputed as one segment. Counting memory shows that SDXL needs more with two
or four.
"""


def fuse(unet: UNet2DConditionModel, implementation: Implementation, channels_last: bool = False) -> None:
    """Fuse the modules of a UNet. Call it after LoRA is injected and the weights are on their device.

    A second call changes the kernel backend of fused modules. Merged projection weights stay merged.

    Args:
        unet: the UNet.
        implementation: the kernel backend, see ``backend``.
        channels_last: whether the convolutions' weights, and so all feature maps, get the memory layout channels_last.
    """
    for module in unet.modules() if channels_last else ():
        if isinstance(module, nn.Conv2d) and not module.weight.requires_grad:  # DoRA creates its own views
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    adopt_all(unet, FUSED)
    if type(unet.conv_norm_out) is nn.GroupNorm and isinstance(unet.conv_act, nn.SiLU):
        unet.conv_norm_out, unet.conv_act = adopt(FusedGroupNorm, unet.conv_norm_out), FusedSiLU()
    for module in unet.modules():
        if isinstance(module, (*FUSED.values(), FusedGroupNorm, FusedSiLU)):
            fused: Any = module
            fused.implementation = implementation
        elif isinstance(module, Attention):
            merge_projections(module)


class FusedGroupNorm(nn.GroupNorm):
    """The UNet's last norm. With Triton it also applies the SiLU that follows."""

    implementation: Implementation

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if self.implementation != "triton":
            return super().forward(x_BCHW)
        return group_norm(x_BCHW, self, "triton")[0]


class FusedSiLU(nn.SiLU):
    """The SiLU after ``FusedGroupNorm``. With Triton it returns its input, because the norm has applied the SiLU."""

    implementation: Implementation

    def forward(self, x: Tensor) -> Tensor:
        return x if self.implementation == "triton" else super().forward(x)


class FusedGEGLU(GEGLU):
    """The gated activation of the feed-forward layer. Its projection may have a LoRA."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        return isinstance(base_of(module.proj), nn.Linear)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        proj = self.proj
        if args or kwargs:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        if (
            self.implementation == "eager"
            and type(proj) is nn.Linear
            and not proj.weight.requires_grad
            and proj.weight.dtype == x.dtype
        ):
            return geglu_of(x, proj.weight, proj.bias)
        return gated("gelu", self.implementation, proj(x))


class FusedResnet(ResnetBlock2D):
    """A ResNet block in which each norm is fused with its SiLU, and with the sum before it.

    The biases of convolutions are added within other sums.
    """

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        plain = module.upsample is None and module.downsample is None and module.time_emb_proj is not None
        plain = plain and module.time_embedding_norm == "default" and not module.skip_time_act
        plain = plain and type(module.norm1) is nn.GroupNorm is type(module.norm2)
        return plain and module.output_scale_factor == 1 and isinstance(module.nonlinearity, nn.SiLU)

    def forward(self, x_BCHW: Tensor, temb_BD: Tensor, skip_BCHW: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Same as in the base class. ``skip_BCHW`` is concatenated to the channels of ``x_BCHW``."""
        if skip_BCHW is not None:
            x_BCHW = torch.cat([x_BCHW, skip_BCHW], dim=1)
        if kwargs or (self.dropout.p > 0 and self.dropout.training):
            output: Tensor = super().forward(x_BCHW, temb_BD, **kwargs)
            return output
        h, x_BCHW = group_norm(x_BCHW, self.norm1, self.implementation)  # reused names free the tensors
        h, bias = _convolved(self.conv1, h)
        shift_BC = self.time_emb_proj(F.silu(temb_BD))
        h, _ = group_norm(h, self.norm2, self.implementation, shift_BC if bias is None else shift_BC + bias)
        h, bias = _convolved(self.conv2, h)
        if self.conv_shortcut is not None:
            x_BCHW, other = _convolved(self.conv_shortcut, x_BCHW)
            bias = other if bias is None else bias if other is None else bias + other
        return residual(x_BCHW, h, bias, self.implementation)


def _convolved(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a convolution's output without bias, and its bias.

    For an adapted layer, return the full output and None.
    """
    if type(conv) in (nn.Conv2d, FrozenConv2d):
        return conv._conv_forward(x, conv.weight, None), conv.bias
    return conv(x), None


class FusedTransformer(Transformer2DModel):
    """A transformer that reads a channels_last feature map as tokens, without a copy.

    The residual's gradient is added to the norm's gradient.
    """

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        plain = type(module.norm) is nn.GroupNorm
        return bool(module.is_input_continuous and plain)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | None = None,
        added_cond_kwargs: Any = None,
        class_labels: Any = None,
        cross_attention_kwargs: Any = None,
        attention_mask: Any = None,
        encoder_attention_mask: Any = None,
        return_dict: bool = True,
    ) -> Any:
        special = (class_labels, cross_attention_kwargs, attention_mask, encoder_attention_mask)
        if return_dict or any(value is not None for value in special):
            return super().forward(
                hidden_states, encoder_hidden_states, timestep, added_cond_kwargs, *special, return_dict
            )
        batch, channels, height, width = hidden_states.shape
        h, shortcut = group_norm(hidden_states, self.norm, self.implementation, silu=False)
        h_BSD = _on_tokens(self.proj_in, h.permute(0, 2, 3, 1).reshape(batch, height * width, channels), height)
        run = _caller(self)
        if isinstance(run, Recomputing):
            h_BSD = run.chain(SEGMENT_LENGTH, list(self.transformer_blocks), h_BSD, None, encoder_hidden_states)
        else:
            for block in self.transformer_blocks:
                h_BSD = run(block, h_BSD, None, encoder_hidden_states)
        h = _on_tokens(self.proj_out, h_BSD, height).reshape(batch, height, width, channels).permute(0, 3, 1, 2)
        return (shortcut + h,)


def _on_tokens(layer: nn.Module, x_BSC: Tensor, height: int) -> Tensor:
    """Return a layer's output for the tokens of a feature map.

    A 1x1 convolution (SD 1.5) is computed as a matrix product.
    """
    if isinstance(layer, nn.Conv2d):
        return F.linear(x_BSC, layer.weight[:, :, 0, 0], layer.bias)
    if not isinstance(base_of(layer), nn.Conv2d):
        output: Tensor = layer(x_BSC)
        return output
    maps_BCHW: Tensor = layer(x_BSC.unflatten(1, (height, -1)).permute(0, 3, 1, 2))
    return maps_BCHW.permute(0, 2, 3, 1).flatten(1, 2)


class FusedUNetBlock(BasicTransformerBlock):
    """A transformer block with residual sums that are fused with the norms that follow."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        plain = module.norm_type == "layer_norm" and module.attn2 is not None and module.pos_embed is None
        norms = (module.norm1, module.norm2, module.norm3)
        affine = all(type(norm) is nn.LayerNorm and norm.bias is not None for norm in norms)
        return plain and affine and not module.only_cross_attention and module._chunk_size is None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Any = None,
        timestep: Any = None,
        cross_attention_kwargs: Any = None,
        class_labels: Any = None,
        added_cond_kwargs: Any = None,
    ) -> Tensor:
        special = (attention_mask, encoder_attention_mask, cross_attention_kwargs, class_labels, added_cond_kwargs)
        if any(value is not None for value in special):
            output: Tensor = super().forward(
                hidden_states,
                attention_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                timestep,
                cross_attention_kwargs,
                class_labels,
                added_cond_kwargs,
            )
            return output
        h, normal = add_layer_norm(hidden_states, None, self.norm1, self.implementation)
        h, normal = add_layer_norm(h, self.attn1(normal), self.norm2, self.implementation)
        h, normal = add_layer_norm(h, self.attn2(normal, encoder_hidden_states), self.norm3, self.implementation)
        out: Tensor = h + self.ff(normal)
        return out


class FusedUpBlock(UpBlock2D):
    """An upward block that concatenates skip tensors within its ResNets, so that recomputation frees the result."""

    @staticmethod
    def fits(module: Any) -> bool:
        return all(isinstance(resnet, FusedResnet) or FusedResnet.fits(resnet) for resnet in module.resnets)

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: tuple[Tensor, ...],
        temb: Tensor | None = None,
        upsample_size: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if args or kwargs or getattr(self, "s1", None):  # FreeU
            output: Tensor = super().forward(
                hidden_states, res_hidden_states_tuple, temb, upsample_size, *args, **kwargs
            )
            return output
        return _upwards(self, hidden_states, res_hidden_states_tuple, temb, upsample_size)


class FusedCrossAttnUpBlock(CrossAttnUpBlock2D):
    """Same as ``FusedUpBlock``, but with attention after each ResNet."""

    fits = FusedUpBlock.fits

    def forward(
        self,
        hidden_states: Tensor,
        res_hidden_states_tuple: tuple[Tensor, ...],
        temb: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        cross_attention_kwargs: Any = None,
        upsample_size: Any = None,
        attention_mask: Any = None,
        encoder_attention_mask: Any = None,
    ) -> Tensor:
        special = (cross_attention_kwargs, attention_mask, encoder_attention_mask)
        if any(value is not None for value in special) or getattr(self, "s1", None):
            output: Tensor = super().forward(
                hidden_states,
                res_hidden_states_tuple,
                temb,
                encoder_hidden_states,
                cross_attention_kwargs,
                upsample_size,
                attention_mask,
                encoder_attention_mask,
            )
            return output
        return _upwards(self, hidden_states, res_hidden_states_tuple, temb, upsample_size, encoder_hidden_states)


def _caller(module: Any) -> Run:
    """Return a function that calls the blocks of a module, with diffusers' gradient checkpointing if it is enabled."""
    recomputes = torch.is_grad_enabled() and module.gradient_checkpointing
    return module._gradient_checkpointing_func if recomputes else _call


def _call(module: nn.Module, *args: Any) -> Any:
    return module(*args)


def _upwards(
    block: Any, h_BCHW: Tensor, skips: tuple[Tensor, ...], temb_BD: Any, size: Any, text_BSD: Any = None
) -> Tensor:
    run = _caller(block)
    attentions = getattr(block, "attentions", [None] * len(block.resnets))
    for resnet, attention, skip in zip(block.resnets, attentions, reversed(skips), strict=True):
        h_BCHW = run(resnet, h_BCHW, temb_BD, skip)
        if attention is not None:
            h_BCHW = attention(h_BCHW, encoder_hidden_states=text_BSD, return_dict=False)[0]
    for upsampler in block.upsamplers or ():
        h_BCHW = upsampler(h_BCHW, size)
    return h_BCHW


FUSED: dict[type[nn.Module], Any] = {
    GEGLU: FusedGEGLU,
    CrossAttnUpBlock2D: FusedCrossAttnUpBlock,
    UpBlock2D: FusedUpBlock,
    ResnetBlock2D: FusedResnet,
    Transformer2DModel: FusedTransformer,
    BasicTransformerBlock: FusedUNetBlock,
    nn.Conv2d: FrozenConv2d,
}


def merge_projections(attention: Attention) -> None:
    """Give an attention layer a ``MergedProjections`` processor, if the layer has no unusual features."""
    if type(attention.processor) is AttnProcessor2_0 and _is_plain_attention(attention):
        attention.set_processor(MergedProjections(attention))


class MergedProjections:
    """An attention processor that computes all projections of one input in one matrix product.

    In self-attention these are query, key and value, in cross-attention the text's key and value.
    """

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
            query, key, value = self.merged(self._layers(attn), hidden_states)
        else:
            query = attn.to_q(hidden_states)
            key, value = self.merged(self._layers(attn), encoder_hidden_states)
        batch, heads = len(query), attn.heads
        query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = attn.to_out[1](attn.to_out[0](mixed.transpose(1, 2).reshape(batch, -1, heads * query.shape[-1])))
        return out

    def _layers(self, attention: Attention) -> list[Any]:
        both = [attention.to_k, attention.to_v]
        return both if self.is_cross else [attention.to_q, *both]


def _is_plain_attention(attention: Attention) -> bool:
    unusual = (attention.spatial_norm, attention.group_norm, attention.norm_q, attention.norm_k, attention.norm_cross)
    bases = [base_of(layer) for layer in (attention.to_q, attention.to_k, attention.to_v)]
    kinds = {type(base) for base in bases}
    linear = kinds in ({nn.Linear}, {PackedLinear}) and all(base.bias is None for base in bases)
    plain = not attention.residual_connection and attention.rescale_output_factor == 1
    return linear and plain and all(part is None for part in unusual)
