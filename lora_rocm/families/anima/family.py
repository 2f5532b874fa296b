"""The Anima family: Cosmos-Predict2's transformer and a conditioner that reads hidden states of Qwen3-0.6B.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from diffusers import AnimaTextConditioner, CosmosTransformer3DModel
from diffusers.loaders import AnimaLoraLoaderMixin
from torch import Tensor
from transformers import Qwen3Model

from lora_rocm.base_models import conversion
from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.families.anima import names
from lora_rocm.families.anima.encoders import MAX_TOKENS, STATES, TextEncoder, load_tokenizers
from lora_rocm.families.anima.vae import ImageVae, vae_of_original
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.common.caption_lm import DTYPE
from lora_rocm.families.common.dit.blocks.cosmos import fuse
from lora_rocm.families.common.dit.detect import names_of
from lora_rocm.families.common.dit.family import TransformerFamily
from lora_rocm.families.common.vae import VaeEncoder
from lora_rocm.families.lora_file_names import LoraFileNames

BLOCK = r"transformer_blocks\.\d+\."
ATTENTION, MLP = r"attn[12]\.(to_[qkv]|to_out\.0)", r"ff\.net\.(0\.proj|2)"
MODULATION = r"norm[123]\.linear_[12]"
NOTICES = {
    "turbo": "According to its name, this base is distilled to few steps (Anima Turbo). Training a "
    "LoRA on it undoes the distillation. Train on Anima itself, and use the LoRA together "
    "with the Turbo LoRA.",
    "preview": "According to its name, this base is a preview of Anima. A LoRA for it is not expected to work with "
    "version 1.0.",
}
"""Notices by a word that the base's name contains, because the tensors do not identify the variant."""
LAYOUT = ModelLayout(
    parts={
        "transformer": ComponentLayout(
            CosmosTransformer3DModel,
            names.PREFIXES[0],
            names.transformer_of_original,
            other_prefixes=names.PREFIXES[1:],
            ignored=names.IGNORED,
        ),
        "text_conditioner": ComponentLayout(
            AnimaTextConditioner,
            names.PREFIXES[0] + names.CONDITIONER,
            conversion.own_names,
            other_prefixes=(*(prefix + names.CONDITIONER for prefix in names.PREFIXES[1:]), names.CONDITIONER),
            ignored=names.IGNORED,
        ),
        "vae": ComponentLayout(ImageVae, "first_stage_model.", vae_of_original, other_prefixes=("vae.",)),
        "text_encoder": ComponentLayout(Qwen3Model, "text_encoders.qwen3_06b.transformer.", conversion.own_names),
    },
    tokenizers={
        "tokenizer": TokenizerOf("qwen3", "text_encoder"),
        "t5_tokenizer": TokenizerOf("t5", "text_conditioner"),
    },
    configs=Path(__file__).parent / "config",
    alone=("transformer", "text_conditioner"),
    changed={"transformer": names.config_changes},
)


class Anima(TransformerFamily):
    """Implements ``ModelFamily`` for Anima."""

    name = "anima"
    layout = LAYOUT
    pipeline = AnimaLoraLoaderMixin
    prefixes = {"transformer": "diffusion_model."}
    fuse_blocks = staticmethod(fuse)
    block_lists = {"transformer_blocks": (2,) * 6}
    packed_layers = f"^{BLOCK}"
    targets = {
        "attention": f"{BLOCK}{ATTENTION}",
        "attention-mlp": f"{BLOCK}({ATTENTION}|{MLP})",
        "all-linear": f"{BLOCK}({ATTENTION}|{MLP}|{MODULATION})",
    }

    @property
    def encoder_dtypes(self) -> Mapping[str, torch.dtype]:
        return {**super().encoder_dtypes, "text_conditioner": DTYPE}

    def encoders(self) -> Sequence[Encoder]:
        return [VaeEncoder(self.source), TextEncoder(self.source, self.weight_format(self.language_model))]

    def token_limits(self) -> Sequence[TokenLimit]:
        found = load_tokenizers(self.source)
        return [TokenLimit(tokenizer.backend_tokenizer.to_str(), MAX_TOKENS) for tokenizer in found]

    def text_example(self, rows: int) -> Tensors:
        width = self.source.config("transformer").whole("text_embed_dim")
        return {STATES: torch.zeros(rows, MAX_TOKENS, width, dtype=torch.bfloat16)}

    @cached_property
    def lora_file_names(self) -> LoraFileNames:
        """Same as ``TransformerFamily.lora_file_names``, but with the original release's names.

        ComfyUI cannot read diffusers' names.
        """

        def comfyui_key(component: str, module: str) -> str:
            return self.prefixes[component] + names.original(module)

        return replace(
            super().lora_file_names,
            key=comfyui_key,
            original=lambda component, module, rows: ((names.original(module), 0, rows),),
        )

    def check(self, source: BaseSource) -> tuple[str, ...]:
        called = names_of(source.name, self.recipe.spec.title)
        told = [notice for word, notice in NOTICES.items() if any(word in name for name in called)]
        return (*super().check(source), *told)

    def velocity(self, model: LoadedModel, latents_BCHW: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        """Same as ``TransformerFamily.velocity``. The model's timestep input is sigma itself, in float32."""
        output_BCFHW = model.components["transformer"](  # the last channel marks padding: none
            hidden_states=torch.nn.functional.pad(latents_BCHW, (0, 0, 0, 0, 0, 1)).to(model.dtype)[:, :, None],
            timestep=sigma_B,
            encoder_hidden_states=batch[STATES].to(model.dtype),
            return_dict=False,
        )[0]
        velocity_BCHW: Tensor = output_BCFHW[:, :, 0]
        return velocity_BCHW
