"""The Z-Image family (arXiv 2511.22699): image and text tokens in one stream. A language model encodes the text.

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusers import ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor
from transformers import Qwen3Model

from lora_rocm.base_models import conversion
from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.dataset.captions.caption_length import TokenLimit
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.common import caption_lm, tokenizers
from lora_rocm.families.common.caption_lm import LanguageModelEncoder
from lora_rocm.families.common.dit.blocks.z_image import fuse
from lora_rocm.families.common.dit.detect import called_otherwise
from lora_rocm.families.common.dit.family import TransformerFamily
from lora_rocm.families.common.vae import VAE, VaeEncoder
from lora_rocm.families.lora_file_names import LoraFileNames, Rows
from lora_rocm.families.z_image import names
from lora_rocm.families.z_image.forward import CAPTION_MULTIPLE, predicted
from lora_rocm.families.z_image.spec import ZImageSection

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # Qwen3's chat, with thinking left to the model
MAX_TOKENS = 512
SHIFTS = {"base": 6.0, "turbo": 3.0}  # of the published scheduler configs
ATTENTION, MLP = r"attention\.(to_[qkv]|to_out\.0)", r"feed_forward\.w[123]"
LAYOUT = ModelLayout(
    parts={
        "transformer": ComponentLayout(
            ZImageTransformer2DModel,
            "model.diffusion_model.",
            names.transformer_of_original,
            other_prefixes=("diffusion_model.",),
            ignored=("norm_final.weight",),
        ),
        "vae": VAE,
        "text_encoder": ComponentLayout(Qwen3Model, "text_encoders.qwen3_4b.transformer.", conversion.own_names),
    },
    tokenizers={"tokenizer": TokenizerOf("qwen3", "text_encoder")},
    configs=Path(__file__).parent / "config",
    alone=("transformer",),
)


class ZImage(TransformerFamily):
    """Implements ``ModelFamily`` for Z-Image."""

    name = "z-image"
    layout = LAYOUT
    pipeline = ZImagePipeline
    prefixes = {"transformer": "diffusion_model."}
    fuse_blocks = staticmethod(fuse)
    block_lists = {"noise_refiner": (), "context_refiner": (), "layers": (2,) * 7}
    packed_layers = r"^(layers|noise_refiner|context_refiner)\.\d+\.(attention|feed_forward)\."
    targets = {
        "attention": rf"layers\.\d+\.{ATTENTION}",
        "attention-mlp": rf"layers\.\d+\.({ATTENTION}|{MLP})",
        "all-linear": rf"(layers|noise_refiner|context_refiner)\.\d+\.({ATTENTION}|{MLP}|adaLN_modulation\.0)",
    }

    def encoders(self) -> Sequence[Encoder]:
        weights = self.weight_format(self.language_model)
        text = LanguageModelEncoder(self.source, TEMPLATE, MAX_TOKENS, 1, CAPTION_MULTIPLE, weights)
        return [VaeEncoder(self.source), text]

    def token_limits(self) -> Sequence[TokenLimit]:
        tokenizer = caption_lm.tokenizer_of(self.source, "tokenizer")
        return [tokenizers.token_limit(tokenizer, TEMPLATE, MAX_TOKENS)]

    def text_example(self, rows: int) -> Tensors:
        return caption_lm.zeros(rows, MAX_TOKENS, self.source.config("transformer").whole("cap_feat_dim"))

    @cached_property
    def lora_file_names(self) -> LoraFileNames:
        """Same as ``TransformerFamily.lora_file_names``, but with names for musubi-tuner.

        These names are based on diffusers' module names, with no modules fused.
        """

        def scripts(component: str, module: str, rows: int) -> Rows:
            return ((f"lora_unet_{module.replace('.', '_')}", 0, rows),)

        return replace(super().lora_file_names, original=names.original_rows, scripts=scripts)

    def check(self, source: BaseSource) -> tuple[str, ...]:
        """Same as ``TransformerFamily.check``.

        The base's name and scheduler are also compared with the recipe's variant.
        """
        notices = super().check(source)
        variant, shift = self._variant, source.config("scheduler").number("shift", 1.0, or_null=True)
        notices += called_otherwise(source, self.recipe.spec, variant, ("turbo",))
        other = next((each for each, its in SHIFTS.items() if its == shift), variant)
        if source.folder != LAYOUT.configs and other != variant:
            notices += (
                f"model.variant is {variant}, but the shift of the base's scheduler is {shift}, as in "
                f"{other}. Training uses the scheduler's shift.",
            )
        if variant == "turbo" and self.recipe.model.training_adapter is None:
            notices += (
                "Z-Image Turbo is distilled to few steps, and training a LoRA on it undoes the "
                "distillation, so images become blurred. Train on the base model (its LoRA works with "
                "Turbo), or set Turbo's training adapter: model.training_adapter.",
            )
        return notices

    @cached_property
    def scheduler_config(self) -> Mapping[str, Any]:
        config = super().scheduler_config
        own = self.source.folder != LAYOUT.configs
        return config if own else {**config, "shift": SHIFTS[self._variant]}

    @property
    def _variant(self) -> str:
        model = self.recipe.model
        assert isinstance(model, ZImageSection), "by the spec"
        return model.variant

    def velocity(self, model: LoadedModel, latents_BCHW: Tensor, sigma_B: Tensor, batch: Tensors) -> Tensor:
        """Same as ``TransformerFamily.velocity``.

        The model's time is ``1 - sigma``, and it predicts the negative velocity.
        """
        transformer, latents_BCHW = model.components["transformer"], latents_BCHW.to(model.dtype)
        return -predicted(transformer, latents_BCHW, 1 - sigma_B, batch)
