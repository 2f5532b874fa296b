"""Build the parts of the tiny SDXL, and write and read them as one diffusers folder."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from sdxl_tokens import END, MAX_LENGTH, START, train_tokenizers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

TIME_DIM = 32


@dataclass
class Parts:
    """All components of a StableDiffusionXLPipeline."""

    tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]
    encoders: tuple[CLIPTextModel, CLIPTextModelWithProjection]
    unet: UNet2DConditionModel
    vae: AutoencoderKL

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The trained modules."""
        named = {"text_encoder": self.encoders[0], "text_encoder_2": self.encoders[1]}
        return {**named, "unet": self.unet, "vae": self.vae}


def text_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    """Three layers; the ids are the tokenizer's real ones, so that pooling finds the end of the text."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=width // 16,
        max_position_embeddings=MAX_LENGTH,
        hidden_act="quick_gelu" if width == 64 else "gelu",
        bos_token_id=tokenizer.convert_tokens_to_ids(START),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.pad_token_id,
    )


def build_vae(toy: bool) -> AutoencoderKL:
    """Four levels: 8x down, 4 latent channels."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 16, 16) if toy else (32, 64, 96, 96),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
        sample_size=128,
        scaling_factor=1.0,
        force_upcast=True,
    )


def build_unet(context: int, pooled: int, toy: bool) -> UNet2DConditionModel:
    """SDXL's block layout at small widths."""
    widths = (16, 32, 32) if toy else (48, 80, 112)
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=widths,
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=tuple(w // 16 for w in widths),
        cross_attention_dim=context,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_DIM,
        projection_class_embeddings_input_dim=6 * TIME_DIM + pooled,
        norm_num_groups=16,
    )


def scheduler() -> EulerDiscreteScheduler:
    """SDXL's scheduler settings."""
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        num_train_timesteps=1000,
        prediction_type="epsilon",
        timestep_spacing="leading",
        steps_offset=1,
        interpolation_type="linear",
        use_karras_sigmas=False,
    )


def build(folder: Path, captions: list[str], seed: int, toy: bool) -> Parts:
    """Fresh parts around the tokenizers, which are written to the folder."""
    train_tokenizers(captions, seed, 60 if toy else 510, folder)
    one = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    two = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
    first, second = CLIPTextModel(text_config(one, 64)), CLIPTextModelWithProjection(text_config(two, 96))
    return Parts((one, two), (first, second), build_unet(64 + 96, 96, toy), build_vae(toy))


def load(folder: Path) -> Parts:
    """The parts of a saved folder, in fp32."""
    pipe = StableDiffusionXLPipeline.from_pretrained(folder, dtype=torch.float32, add_watermarker=False)
    return Parts((pipe.tokenizer, pipe.tokenizer_2), (pipe.text_encoder, pipe.text_encoder_2), pipe.unet, pipe.vae)


def save(parts: Parts, folder: Path) -> None:
    """Write the diffusers folder as fp16 safetensors and give the parts back in fp32 as they were."""
    half = copy.deepcopy((parts.encoders, parts.unet, parts.vae))
    (first, second), unet, vae = half
    pipe = StableDiffusionXLPipeline(
        vae=vae.cpu().half(),
        text_encoder=first.cpu().half(),
        text_encoder_2=second.cpu().half(),
        tokenizer=parts.tokenizers[0],
        tokenizer_2=parts.tokenizers[1],
        unet=unet.cpu().half(),
        scheduler=scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    for tokenizer in parts.tokenizers:
        # Encoding leaves its padding and cutting switched on, and saving would make that everybody's default.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    pipe.save_pretrained(folder, safe_serialization=True)
    for config in (folder / "unet" / "config.json", folder / "vae" / "config.json"):
        # Where the weights were read from concerns nobody else.
        fields = json.loads(config.read_text(encoding="utf-8"))
        fields.pop("_name_or_path", None)
        config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    restore_prefix(folder / "text_encoder" / "model.safetensors")


def restore_prefix(path: Path) -> None:
    """Name the first encoder's weights `text_model.*`, as SDXL's own files do.

    Newer transformers leave that out when saving, which older ones cannot read; every version reads the long names.
    """
    weights = load_file(path)
    named = {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in weights.items()}
    save_file(named, path, metadata={"format": "pt"})
