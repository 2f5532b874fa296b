"""The FLUX.1 family: text and image tokens in two streams, then in one. CLIP-L and T5-XXL encode the text.

Dimensions: B batch, C channels, H W latent height and width, I image tokens, S text tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from torch import Tensor
from transformers import CLIPTextModel, T5EncoderModel

from lora_rocm.base_models import conversion
from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.errors import ModelError
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.dit.blocks.flux import fuse
from lora_rocm.families.common.dit.detect import called_otherwise
from lora_rocm.families.common.dit.family import TransformerFamily
from lora_rocm.families.common.dit.packing import packed, places, unpacked
from lora_rocm.families.common.dit.sampling import GUIDANCE
from lora_rocm.families.common.vae import VAE, VaeEncoder
from lora_rocm.families.flux import names
from lora_rocm.families.flux.encoders import (
    POOLED,
    STATES,
    TextEncoder,
    TextPart,
    clip_part,
    require_distances,
    t5_part,
)
from lora_rocm.families.flux.spec import FluxSection
from lora_rocm.families.lora_file_names import LoraFileNames
from lora_rocm.families.objectives.base import CONTROL_LATENTS, Prediction
from lora_rocm.recipe.schema import Recipe

MAX_TOKENS, MAX_TOKENS_SCHNELL = 512, 256
BLOCK = r"(single_)?transformer_blocks\.\d+\."
ATTENTION = r"attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
MLP = r"ff(_context)?\.net\.(0\.proj|2)|proj_mlp|proj_out"
T5 = "text_encoder_2"
MODULATION = r"norm(1|1_context)?\.linear"
PARTS = {
    "transformer": ComponentLayout(
        FluxTransformer2DModel,
        "model.diffusion_model.",
        names.transformer_of_original,
        other_prefixes=("diffusion_model.",),
    ),
    "vae": VAE,
    "text_encoder": ComponentLayout(CLIPTextModel, "text_encoders.clip_l.transformer.", conversion.own_names),
    T5: ComponentLayout(T5EncoderModel, "text_encoders.t5xxl.transformer.", conversion.own_names),
}
LAYOUT = ModelLayout(
    parts=PARTS,
    tokenizers={
        "tokenizer": TokenizerOf("clip_l", "text_encoder", pools=True),
        "tokenizer_2": TokenizerOf("t5", T5),
    },
    configs=Path(__file__).parent / "config_dev",
    alone=("transformer",),
)
LAYOUT_SCHNELL = replace(LAYOUT, configs=Path(__file__).parent / "config_schnell")


class Flux(TransformerFamily):
    """Implements ``ModelFamily`` for FLUX.1."""

    name = "flux"
    pipeline = FluxLoraLoaderMixin
    reader_options = {"network_alphas": None}
    prefixes = {"transformer": "transformer."}
    fuse_blocks = staticmethod(fuse)
    block_lists = {"transformer_blocks": (2,) * 9, "single_transformer_blocks": (3,) * 5 + (2,) * 9}
    num_streams = 2
    packed_layers = f"^{BLOCK}"
    language_model = T5
    language_layers = r"(^|\.)block\.\d+\."
    told_guidance = True
    targets = {
        "attention": f"{BLOCK}{ATTENTION}",
        "attention-mlp": f"{BLOCK}({ATTENTION}|{MLP})",
        "all-linear": f"{BLOCK}({ATTENTION}|{MLP}|{MODULATION})",
    }

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        assert isinstance(recipe.model, FluxSection), "by the spec"
        self._model = recipe.model
        self._is_schnell = recipe.model.variant == "schnell"
        self._tokens = MAX_TOKENS_SCHNELL if self._is_schnell else MAX_TOKENS
        self.layout = LAYOUT_SCHNELL if self._is_schnell else LAYOUT

    def encoders(self) -> Sequence[Encoder]:
        return [VaeEncoder(self.source), self._text_encoder(clip_part()), self._text_encoder(t5_part(self._tokens))]

    def _text_encoder(self, part: TextPart) -> TextEncoder:
        return TextEncoder(self.source, part, self.weight_format(part.component))

    def token_limits(self) -> Sequence[TokenLimit]:
        """Return T5's tokenizer and limit. CLIP reads only the start of a long caption, but T5 reads the rest.

        Both tokenizers are loaded.
        """
        _, t5 = [self._text_encoder(part).tokenizer() for part in (clip_part(), t5_part(self._tokens))]
        return [clip.token_limit(t5, self._tokens)]

    def text_example(self, rows: int) -> Tensors:
        config = self.source.config("transformer")
        states = torch.zeros(rows, self._tokens, config.whole("joint_attention_dim"), dtype=torch.bfloat16)
        return {STATES: states, POOLED: torch.zeros(rows, config.whole("pooled_projection_dim"))}

    @cached_property
    def lora_file_names(self) -> LoraFileNames:
        return replace(super().lora_file_names, original=names.original_rows)

    def check(self, source: BaseSource) -> tuple[str, ...]:
        """Same as ``TransformerFamily.check``. The variant in the base's configs is also compared with the recipe's."""
        # A single file: its tensors show whether it reads guidance.
        header, variant = source.single_header, self._model.variant
        if header is not None and names.reads_guidance(header.tensors) is self._is_schnell:
            has, other = ("an", "none") if self._is_schnell else ("no", "one")
            raise ModelError(
                "wrong-variant",
                f"This transformer has {has} input for guidance, but the variant {variant} has {other}.",
                where=f"model.variant: {variant} (model.name_or_path: {source.name})",
                fix=f"Set model.variant: {'dev or kontext' if self._is_schnell else 'schnell'}.",
            )
        notices = super().check(source)
        if T5 in source.layout.parts:
            require_distances(source.config(T5))
        # The variant by configs, then by name.
        dynamic, guided = (
            source.config(name).flag(key)
            for name, key in (("scheduler", "use_dynamic_shifting"), ("transformer", "guidance_embeds"))
        )
        if self._is_schnell in (dynamic, guided):
            notices += (
                f"model.variant is {variant}, but the configs of the base belong to another variant "
                f"(guidance: {guided}, dynamic shift: {dynamic}). Training uses the configs, except for "
                "the maximum text length, which depends on the variant.",
            )
        known = ("schnell", "kontext", "dev")  # Kontext's name ends with dev
        notices += called_otherwise(source, self.recipe.spec, variant, known)
        if self._is_schnell and self._model.training_adapter is None:
            notices += (
                "FLUX.1 schnell is distilled to few steps, and training a LoRA on it undoes the "
                "distillation. Train on dev (its LoRA works with schnell), or set schnell's training "
                "adapter: model.training_adapter.",
            )
        return notices

    def predict(self, model: LoadedModel, batch: Tensors, draws: Tensors) -> Prediction:
        """Same as ``TransformerFamily.predict``, but with rounded noise levels.

        The model computes 1000 * sigma in its own dtype. So sigma is rounded in the same way before noise is added.
        """
        seen_B = (draws["sigma"].to(model.dtype) * 1000).float() / 1000
        noisy_BCHW, target_BCHW = self.objective.noised(batch, {**draws, "sigma": seen_B})
        if CONTROL_LATENTS in batch:
            batch = {**batch, CONTROL_LATENTS: self.latents.normalised(batch[CONTROL_LATENTS], draws)}
        predicted_BCHW = self.velocity(model, noisy_BCHW, draws["sigma"], batch)
        return self.objective.prediction(predicted_BCHW, target_BCHW, draws)

    def velocity(self, model: LoadedModel, latents_BCHW: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        """Same as ``TransformerFamily.velocity``.

        ``batch`` may also contain the guidance scale [B], which is a model input.

        ``batch`` may also contain normalised latents of control images. Their tokens are appended to the image's
        tokens.
        """
        high, wide = latents_BCHW.shape[-2] // self.patch, latents_BCHW.shape[-1] // self.patch
        tokens_BID, image_I3 = packed(latents_BCHW.to(model.dtype)), places(high, wide, latents_BCHW.device)
        if CONTROL_LATENTS in batch:
            tokens_BID = torch.cat([tokens_BID, packed(batch[CONTROL_LATENTS].to(model.dtype))], dim=1)
            image_I3 = torch.cat([image_I3, places(high, wide, latents_BCHW.device, number=1)])
        told_B = batch[GUIDANCE] if GUIDANCE in batch else torch.full_like(sigma_B, self._model.guidance)
        predicted_BID = model.components["transformer"](
            hidden_states=tokens_BID,
            encoder_hidden_states=batch[STATES].to(model.dtype),
            pooled_projections=batch[POOLED].to(model.dtype),
            timestep=sigma_B,
            img_ids=image_I3,
            txt_ids=image_I3.new_zeros(batch[STATES].shape[1], 3),
            guidance=told_B if self.source.config("transformer").flag("guidance_embeds") else None,
            return_dict=False,
        )[0]
        return unpacked(predicted_BID[:, : high * wide], *latents_BCHW.shape[-2:])
