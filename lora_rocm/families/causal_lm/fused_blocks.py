"""Fused blocks of Llama-like decoders: RMSNorms, rotary embedding, causal attention and a gated MLP.

A block is fused if its class and all of its parts are known (``_parts``). All other blocks keep transformers' forward.

Dimensions: B batch, S tokens, H heads, D width, N width of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from lora_rocm.families.causal_lm.attention import APART, causal
from lora_rocm.families.common.adopt import adopt
from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.gated import Activation, gated
from lora_rocm.kernels.made_again import Made, made, made_again
from lora_rocm.kernels.merged import MergedLinears
from lora_rocm.kernels.norms import Branch, RowNorm, add_branch, add_norm, normal_again
from lora_rocm.kernels.rotary import Rotation, norm_rotary

ARCHITECTURES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "SmolLM3", "Gemma3")
"""Name prefixes of the transformers classes that can be fused."""
WINDOW_OF_CONFIG = ("Mistral", "Phi3")
"""Architectures with an attention class that reads ``sliding_window`` from the config instead of an attribute."""
LLAMA_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
"""Names of the norms before and after attention, and before and after the MLP."""
SEPARATE_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
JOINT_ATTENTION = ("qkv_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
SEPARATE_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")
JOINT_MLP = ("gate_up_proj", "down_proj", "activation_fn")
KNOWN_ARGUMENTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", APART}


@dataclass(frozen=True)
class Parts:
    """The structure of a block.

    Attributes:
        norms: names of the norms before and after attention, and before and after the MLP; None for a missing norm.
        plus_one: whether norms multiply by 1 + weight, in float32.
        activation: activation function of the gate.
        window: number of latest tokens that a token attends to, including itself, or None for all.
        turns: whether queries and keys have a rotary embedding.
    """

    norms: tuple[str | None, ...]
    plus_one: bool
    activation: Activation
    window: int | None
    turns: bool


def fuse(layers: nn.Module, implementation: Implementation) -> None:
    """Fuse all known blocks in a list. A second call changes the kernel backend.

    Call it after LoRA is injected and the weights are on their device.
    """
    for name, block in list(layers.named_children()):
        fused: Any = block
        if not isinstance(block, FusedDecoderLayer):
            parts = _parts(block)
            if parts is None:
                continue
            fused = adopt(_fused(type(block)), block)
            fused.parts = parts
            fused.merged_attention = _merged(fused.self_attn, SEPARATE_ATTENTION[:3])
            fused.merged_mlp = _merged(fused.mlp, SEPARATE_MLP[:2])
            setattr(layers, name, fused)
        fused.implementation = implementation


class FusedDecoderLayer(nn.Module):
    """A fused block. With a KV cache it calls the original forward."""

    implementation: Implementation
    parts: Parts
    merged_attention: MergedLinears | None
    merged_mlp: MergedLinears | None
    self_attn: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = {name for name, value in kwargs.items() if value is not None}
        if args or {"past_key_values", "attention_mask"} & given or not given <= KNOWN_ARGUMENTS:
            output: Tensor = super().forward(hidden_states, *args, **kwargs)
            return output
        before_attention, after_attention, before_mlp, after_mlp = self.parts.norms
        norm = self._norm(before_attention)
        x, normal = add_norm(hidden_states, None, norm, self.implementation)
        with made_again((normal, normal_again(x, norm, self.implementation))):
            y = self._attended(normal, kwargs)
        norm = self._norm(before_mlp)
        x, normal = add_norm(x, self._branch(y, after_attention), norm, self.implementation)
        with made_again((normal, normal_again(x, norm, self.implementation))):
            gate, up = self._projected(self.mlp, normal, self.merged_mlp, SEPARATE_MLP[:2], (1, 1))
        activation, implementation = self.parts.activation, self.implementation
        inner = made(lambda given: gated(activation, implementation, *given), (up, gate))
        with made_again(inner):
            y = self.mlp.down_proj(inner[0])
        return add_branch(x, self._branch(y, after_mlp), self.implementation)

    def _attended(self, x_BSD: Tensor, given: dict[str, Any]) -> Tensor:
        attention = self.self_attn
        cos, sin = given["position_embeddings"]
        if self.parts.turns and cos.shape[-1] != attention.head_dim:  # only a part of each head is rotated
            output: Tensor = attention(hidden_states=x_BSD, **{"attention_mask": None, **given})[0]
            return output
        heads = attention.config.num_attention_heads, *(attention.config.num_key_value_heads,) * 2
        projected = self._projected(attention, x_BSD, self.merged_attention, SEPARATE_ATTENTION[:3], heads)
        query, key, value = (tensor.unflatten(-1, (-1, attention.head_dim)) for tensor in projected)
        rotation = _rotation(cos, sin) if self.parts.turns else None
        q, k = self._turned(query, "q_norm", rotation), self._turned(key, "k_norm", rotation)
        q_BHSD, k_BHSD, v_BHSD = (tensor.transpose(1, 2) for tensor in (q[0], k[0], value))
        with made_again(q, k):
            mixed, _ = causal(
                attention,
                q_BHSD,
                k_BHSD,
                v_BHSD,
                None,
                scaling=attention.scaling,
                sliding_window=self.parts.window,
                apart_B1SS=given.get(APART),
            )
        output = attention.o_proj(mixed.flatten(2))
        return output

    @staticmethod
    def _projected(
        module: Any, x: Tensor, merged: MergedLinears | None, names: Sequence[str], shares: Sequence[int]
    ) -> Sequence[Tensor]:
        """Return the outputs of the named layers for the same input ``x``.

        If the module has one joint layer instead, its output is split in the proportions ``shares``.
        """
        layers = [getattr(module, name) for name in names if hasattr(module, name)]
        if layers:
            return [layer(x) for layer in layers] if merged is None else merged(layers, x)
        joined = module.qkv_proj(x) if hasattr(module, "qkv_proj") else module.gate_up_proj(x)
        each = joined.shape[-1] // sum(shares)
        parts: Sequence[Tensor] = joined.split([each * share for share in shares], dim=-1)
        return parts

    def _turned(self, heads: Tensor, norm_name: str, rotation: Rotation | None) -> Made:
        """Return queries or keys [B, S, H, D] after normalisation and rotation."""
        norm = getattr(self.self_attn, norm_name, None)
        if norm is None and rotation is None:
            return made(itemgetter(0), [heads])
        weight, eps = None, 0.0
        if norm is not None:
            rows = self._row_norm(norm)
            weight, eps = rows.weight.detach(), rows.eps
        turn = Rotation.none(heads) if rotation is None else rotation

        def turned(given: Sequence[Tensor]) -> Tensor:
            return norm_rotary([(given[0], weight)], eps, turn, self.implementation)

        return made(turned, [heads])

    def _norm(self, name: str | None) -> RowNorm:
        assert name is not None, "attention and MLP have norms before them"
        return self._row_norm(getattr(self, name))

    def _row_norm(self, norm: Any) -> RowNorm:
        if self.parts.plus_one:
            return RowNorm(1 + norm.weight.float(), None, norm.eps, dtype=norm.weight.dtype)
        return RowNorm(norm.weight, None, norm.variance_epsilon)

    def _branch(self, y: Tensor, norm_name: str | None) -> Branch:
        if norm_name is None:
            return Branch(y)
        norm = self._norm(norm_name)
        return Branch(y, norm.weight, norm.eps)


FUSED: dict[type[nn.Module], type[FusedDecoderLayer]] = {}
"""Fused classes by the transformers class that they replace."""


def _rotation(cos: Tensor, sin: Tensor) -> Rotation:
    """Return the rotation for transformers' tables [1 or B, S, D], in which both halves contain all angles."""
    pairs = cos.shape[-1] // 2
    cos, sin = (table[0] if len(table) == 1 else table for table in (cos, sin))
    return Rotation(cos[..., :pairs], sin[..., :pairs], interleaved=False)


def _merged(module: nn.Module, names: Sequence[str]) -> MergedLinears | None:
    layers = [module.get_submodule(name) for name in names if hasattr(module, name)]
    return MergedLinears.of(*layers) if layers else None


def _fused(cls: type[nn.Module]) -> type[FusedDecoderLayer]:
    """Return the fused subclass of a block's class. It is created once."""
    if cls not in FUSED:
        FUSED[cls] = type(f"Fused{cls.__name__}", (FusedDecoderLayer, cls), {})
    return FUSED[cls]


def _parts(block: nn.Module) -> Parts | None:
    """Return the structure of a block, or None if the fused forward does not support it."""
    known = next((name for name in ARCHITECTURES if _is(block, name, "DecoderLayer")), None)
    if known is None or list(block.parameters(recurse=False)):
        return None
    children = dict(block.named_children())
    dropouts = [children.pop(name) for name in list(children) if isinstance(children[name], nn.Dropout)]
    attention, mlp = children.pop("self_attn", None), children.pop("mlp", None)
    norms = GEMMA_NORMS if known == "Gemma3" else LLAMA_NORMS
    if attention is None or mlp is None or set(children) != {*norms} - {None} or any(drop.p for drop in dropouts):
        return None
    heads = [child for name, child in attention.named_children() if name in HEAD_NORMS]
    if not all(_is(norm, known, "RMSNorm") for norm in (*children.values(), *heads)):
        return None
    activation = _activation(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None)))
    if not _is_known_attention(attention, len(heads)) or activation is None:
        return None
    if {name for name, _ in mlp.named_children()} not in ({*SEPARATE_MLP}, {*JOINT_MLP}):
        return None
    holder = attention.config if known in WINDOW_OF_CONFIG else attention
    turns = bool(getattr(attention, "use_rope", True))
    return Parts(norms, known == "Gemma3", activation, getattr(holder, "sliding_window", None), turns)


def _is_known_attention(attention: Any, num_norms: int) -> bool:
    names = {name for name, _ in attention.named_children()} - {*HEAD_NORMS}
    return (
        names in ({*SEPARATE_ATTENTION}, {*JOINT_ATTENTION})
        and num_norms in (0, 2)
        and not list(attention.parameters(recurse=False))
        and attention.is_causal
        and not attention.attention_dropout
        and getattr(attention, "attn_logit_softcapping", None) is None
    )


def _activation(module: Any) -> Activation | None:
    if isinstance(module, SiLUActivation | nn.SiLU):
        return "silu"
    by_tanh = isinstance(module, GELUTanh) and getattr(module.act, "func", None) is torch.nn.functional.gelu
    return "gelu-tanh" if by_tanh else None


def _is(module: nn.Module, architecture: str, kind: str) -> bool:
    """Whether a module is of a class of transformers. The class is not imported."""
    cls, name = type(module), architecture.lower()
    return (cls.__module__, cls.__name__) == (f"transformers.models.{name}.modeling_{name}", architecture + kind)
