"""The families Stable Diffusion 1.x and 2.x (arXiv 2112.10752) with one UNet, one VAE and one text encoder.

Dimensions: B batch, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from lora_rocm.base_models.loading import BaseSource, ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.unet import inpainting, original_names
from lora_rocm.families.common.unet.detect import UNET_PREFIX, Expected
from lora_rocm.families.common.unet.family import LdmFamily
from lora_rocm.families.common.vae import VAE
from lora_rocm.families.sd.encoders import TextEncoder

EXPECTED_SD15 = Expected(
    title="Stable Diffusion 1.x",
    with_article="a Stable Diffusion 1.x",
    family="sd15",
    has_sizes=False,
    width=768,
)
EXPECTED_SD2 = Expected(
    title="Stable Diffusion 2.x",
    with_article="a Stable Diffusion 2.x",
    family="sd2",
    has_sizes=False,
    width=1024,
)
TELLING_BIAS = f"{UNET_PREFIX}output_blocks.11.1.transformer_blocks.0.norm1.bias"
V_PREDICTION_DEVIATION = 0.09


def predicts_velocity(source: BaseSource) -> bool:
    """Whether a one-file Stable Diffusion 2.x checkpoint predicts the velocity, which its header does not record.

    The published 768-pixel models predict the velocity. One bias of their last block has a larger spread than in the
    other models (as in ComfyUI's model detection, ``supported_models.SD20``).
    """
    header = source.single_header
    if header is None or TELLING_BIAS not in header.tensors:
        return False
    bias_C = read_tensors(header, lambda name: name == TELLING_BIAS)[TELLING_BIAS]
    return float(bias_C.float().std(unbiased=False)) > V_PREDICTION_DEVIATION


UNET = ComponentLayout(UNet2DConditionModel, "model.diffusion_model.", original_names.of_unet)
LAYOUT_SD15 = ModelLayout(
    parts={
        "unet": UNET,
        "vae": VAE,
        "text_encoder": ComponentLayout(CLIPTextModel, "cond_stage_model.", original_names.of_clip),
    },
    tokenizers={"tokenizer": TokenizerOf("clip_l", "text_encoder")},
    configs=Path(__file__).parent / "config_sd15",
    changed={"unet": inpainting.config_changes},
)
LAYOUT_SD2 = ModelLayout(
    parts={
        "unet": UNET,
        "vae": VAE,
        "text_encoder": ComponentLayout(
            CLIPTextModel,
            "cond_stage_model.",
            original_names.of_open_clip("cond_stage_model.model."),
            ignored=("model.text_projection", "model.transformer.resblocks.23."),  # the last layer is not used
        ),
    },
    tokenizers={"tokenizer": TokenizerOf("clip_g", "text_encoder")},
    configs=Path(__file__).parent / "config_sd2",
    changed={"unet": inpainting.config_changes},
)


class StableDiffusion(LdmFamily):
    """Implements the part of ``ModelFamily`` that both versions share."""

    pipeline = StableDiffusionPipeline
    text_components = ("text_encoder",)
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te_"}
    token_names = ("input_ids",)

    def text_encoders(self) -> Sequence[Encoder]:
        return [TextEncoder(self.source, self.max_tokens)]

    def text_example(self, rows: int) -> Tensors:
        if self.recipe.lora.tokenises:
            return {"input_ids": torch.zeros(rows, clip.CLIP_TOKENS, dtype=torch.int64)}
        width = self.source.config("unet").whole("cross_attention_dim")
        return {"prompt_embeds": torch.zeros(rows, clip.CLIP_TOKENS, width)}

    def conditioning(self, model: LoadedModel, batch: Tensors) -> dict[str, Any]:
        return {"encoder_hidden_states": self._text(model, batch).to(model.dtype)}

    def prompt_arguments(self, model: LoadedModel, batch: Tensors) -> dict[str, Tensor]:
        return {"prompt_embeds": self._text(model, batch)}

    def _text(self, model: LoadedModel, batch: Tensors) -> Tensor:
        if "prompt_embeds" in batch:
            return batch["prompt_embeds"]
        return clip.last_states(model.components["text_encoder"], batch["input_ids"])

    def make_pipeline(self, unet: nn.Module, scheduler: Any) -> StableDiffusionPipeline:
        return StableDiffusionPipeline(
            vae=None,
            text_encoder=None,
            tokenizer=None,
            unet=unet,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )

    def kohya_key(self, component: str, module: str) -> str:
        """Return kohya's name: based on diffusers' names for the UNet, and with ``text_model`` for the text encoder."""
        if component == "unet":
            return f"lora_unet_{module.replace('.', '_')}"
        return f"lora_te_text_model_{module.removeprefix('text_model.').replace('.', '_')}"


class Sd15(StableDiffusion):
    """Implements ``ModelFamily`` for Stable Diffusion 1.x, with CLIP ViT-L/14 as text encoder."""

    name = "sd15"
    layout = LAYOUT_SD15
    expected = EXPECTED_SD15


class Sd2(StableDiffusion):
    """Implements ``ModelFamily`` for Stable Diffusion 2.x, with the penultimate layer of OpenCLIP ViT-H."""

    name = "sd2"
    layout = LAYOUT_SD2
    expected = EXPECTED_SD2

    def published_scheduler(self, source: BaseSource) -> dict[str, Any]:
        """Return the scheduler config. For a one-file checkpoint, the weights determine the prediction type.

        The packaged config belongs to the 768-pixel model.
        """
        config = super().published_scheduler(source)
        if source.single_file is None or source.folder != self.layout.configs:
            return config
        return config | {"prediction_type": "v_prediction" if predicts_velocity(source) else "epsilon"}
