"""The SDXL family (arXiv 2307.01952).

Dimensions: B batch, C channels, H W latent height and width, S tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from lora_rocm.base_models.loading import ComponentLayout, ModelLayout, TokenizerOf
from lora_rocm.families.base import Encoder, LoadedModel, Tensors
from lora_rocm.families.common import clip
from lora_rocm.families.common.unet import inpainting, lora_file_names, original_names
from lora_rocm.families.common.unet.detect import Expected
from lora_rocm.families.common.unet.family import LdmFamily
from lora_rocm.families.common.vae import VAE
from lora_rocm.families.sdxl.encoders import TEXT_COMPONENTS, TextEncoder

EXPECTED = Expected(
    title="SDXL",
    with_article="an SDXL",
    family="sdxl",
    has_sizes=True,
    width=2048,
)
LAYOUT = ModelLayout(
    parts={
        "unet": ComponentLayout(UNet2DConditionModel, "model.diffusion_model.", original_names.of_unet),
        "vae": VAE,
        "text_encoder": ComponentLayout(CLIPTextModel, "conditioner.embedders.0.", original_names.of_clip),
        "text_encoder_2": ComponentLayout(
            CLIPTextModelWithProjection,
            "conditioner.embedders.1.",
            original_names.of_open_clip("conditioner.embedders.1.model."),
        ),
    },
    tokenizers={
        "tokenizer": TokenizerOf("clip_l", "text_encoder"),
        "tokenizer_2": TokenizerOf("clip_g", "text_encoder_2", pools=True),
    },
    configs=Path(__file__).parent / "config",
    changed={"unet": inpainting.config_changes},
)


class Sdxl(LdmFamily):
    """Implements ``ModelFamily`` for SDXL."""

    name = "sdxl"
    layout = LAYOUT
    expected = EXPECTED
    pipeline = StableDiffusionXLPipeline
    text_components = TEXT_COMPONENTS
    prefixes = lora_file_names.PREFIXES
    token_names = ("input_ids_1", "input_ids_2")

    def text_encoders(self) -> Sequence[Encoder]:
        return [TextEncoder(self.source, number, self.max_tokens) for number in (1, 2)]

    def sample_meta(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Tensors:
        """Return SDXL's size and crop conditioning, int64 [6], in the order of diffusers' ``_get_add_time_ids``.

        Source: arXiv 2307.01952, section 2.2.
        """
        return {"time_ids": torch.tensor([*original_hw, *crop_top_left, *target_hw], dtype=torch.int64)}

    def text_example(self, rows: int) -> Tensors:
        if self.recipe.lora.tokenises:
            ids = torch.zeros(rows, clip.CLIP_TOKENS, dtype=torch.int64)
            return {name: ids.clone() for name in self.token_names}
        unet = self.source.config("unet")
        for key in ("projection_class_embeddings_input_dim", "addition_time_embed_dim"):
            unet.whole(key)  # an error names the key
        pooled = self.source.config(self.text_components[-1]).whole("projection_dim", 512)
        prompts = {
            f"prompt_embeds_{number}": torch.zeros(
                rows, clip.CLIP_TOKENS, self.source.config(name).whole("hidden_size", 512)
            )
            for number, name in enumerate(self.text_components, 1)
        }
        return {**prompts, "pooled_embeds": torch.zeros(rows, pooled)}

    def conditioning(self, model: LoadedModel, batch: Tensors) -> dict[str, Any]:
        prompt_BSD, pooled_BD = self._text(model, batch)
        return {
            "encoder_hidden_states": prompt_BSD.to(model.dtype),
            "added_cond_kwargs": {"text_embeds": pooled_BD.to(model.dtype), "time_ids": batch["time_ids"]},
        }

    def prompt_arguments(self, model: LoadedModel, batch: Tensors) -> dict[str, Tensor]:
        prompt_BSD, pooled_BD = self._text(model, batch)
        return {"prompt_embeds": prompt_BSD, "pooled_prompt_embeds": pooled_BD}

    def _text(self, model: LoadedModel, batch: Tensors) -> tuple[Tensor, Tensor]:
        if "pooled_embeds" in batch:
            prompt_BSD = torch.cat([batch["prompt_embeds_1"], batch["prompt_embeds_2"]], dim=-1)
            return prompt_BSD, batch["pooled_embeds"]
        encoders = [model.components[name] for name in self.text_components]
        return clip.embed(encoders, [batch[name] for name in self.token_names])

    def make_pipeline(self, unet: nn.Module, scheduler: Any) -> StableDiffusionXLPipeline:
        return StableDiffusionXLPipeline(
            vae=None,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=unet,
            scheduler=scheduler,
            add_watermarker=False,
        )

    def kohya_key(self, component: str, module: str) -> str:
        return lora_file_names.kohya_key(component, module, self.source.config("unet"))
