"""Random tiny Stable Diffusion 1.x and 2.x models: the block topology of the real ones, width 16 and 32.

``write_tiny_sd`` makes a diffusers folder; ``write_single_sd`` writes the same weights as the one-file checkpoint
of the original releases (SD 1.x with CLIP's names, SD 2.x with OpenCLIP's).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from tests.tiny_models import END, _ldm_vae, _open_clip, scheduler_config, text_config, tiny_vae, vocabulary

Version = Literal["sd15", "sd2"]
WIDTH = 32
SHALLOW_SD: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (8, 8),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}
"""For whole runs and where the names of the original release do not count: two levels with fewer layers."""


def unet_config(version: Version, **changes: Any) -> dict[str, Any]:
    """Four levels, the lowest without attention; 1.x projects by convolutions, 2.x by linear layers."""
    config: dict[str, Any] = {
        "sample_size": 8,
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        "block_out_channels": (16, 32, 32, 32),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 2,
    }
    if version == "sd2":
        config |= {"use_linear_projection": True, "attention_head_dim": (2, 4, 4, 4), "upcast_attention": True}
    return config | changes


def tiny_sd(version: Version, seed: int = 0, unet: dict[str, Any] | None = None, **scheduler: Any) -> Any:
    """A random tiny pipeline; the same seed gives the same weights."""
    vocab, merges = vocabulary()
    pad = {"sd15": END, "sd2": "!"}[version]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StableDiffusionPipeline(
            vae=tiny_vae(scaling_factor=0.18215),
            text_encoder=CLIPTextModel(text_config(WIDTH, vocab, vocab[pad])),
            tokenizer=CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token=pad),
            unet=UNet2DConditionModel(**unet_config(version, **(unet or {}))),
            scheduler=EulerDiscreteScheduler(**scheduler_config(**scheduler)),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def write_tiny_sd(
    folder: Path, version: Version = "sd15", unet: dict[str, Any] | None = None, **scheduler: Any
) -> Path:
    """Write a random tiny model as a diffusers folder and return the folder."""
    tiny_sd(version, unet=unet, **scheduler).save_pretrained(folder, safe_serialization=True)
    return folder


def write_single_sd(pipeline: Any, version: Version, path: Path, extra: dict[str, Tensor] | None = None) -> Path:
    """Write a pipeline in the layout of the original releases."""
    tensors = {f"model.diffusion_model.{k}": v for k, v in _ldm_unet(pipeline.unet.state_dict()).items()}
    tensors |= {f"first_stage_model.{k}": v for k, v in _ldm_vae(pipeline.vae.state_dict()).items()}
    text = pipeline.text_encoder.state_dict()
    if version == "sd15":
        names = {f"cond_stage_model.transformer.text_model.{k.removeprefix('text_model.')}": k for k in text}
        tensors |= {name: text[key] for name, key in names.items()}
    else:
        unread = {"text_projection.weight": torch.zeros(WIDTH, WIDTH)}  # in every such file
        tensors |= {f"cond_stage_model.model.{k}": v for k, v in _open_clip(text | unread).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().clone().contiguous() for k, v in (tensors | (extra or {})).items()}, path)
    return path


def write_sd_configs(pipeline: Any, folder: Path) -> Path:
    """The configs and tokenizer alone, as ``model.config`` expects them for a one-file checkpoint."""
    for name in ("unet", "vae", "scheduler"):
        getattr(pipeline, name).save_config(folder / name)
    pipeline.text_encoder.config.save_pretrained(folder / "text_encoder")
    pipeline.tokenizer.save_pretrained(folder / "tokenizer")
    pipeline.save_config(folder)
    return folder


def _ldm_unet(state: dict[str, Tensor]) -> dict[str, Tensor]:
    simple = {
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
    }
    for block in range(4):
        simple[f"down_blocks.{block}.downsamplers.0.conv"] = f"input_blocks.{3 * block + 3}.0.op"
        simple[f"up_blocks.{block}.upsamplers.0.conv"] = f"output_blocks.{3 * block + 2}.{2 if block else 1}.conv"
        for layer in range(3):
            for kind, place in (("resnets", 0), ("attentions", 1)):
                simple[f"down_blocks.{block}.{kind}.{layer}"] = f"input_blocks.{3 * block + layer + 1}.{place}"
                simple[f"up_blocks.{block}.{kind}.{layer}"] = f"output_blocks.{3 * block + layer}.{place}"
    resnet = {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    }
    renamed = {}
    for key, value in state.items():
        prefix = max((p for p in simple if key.startswith(p + ".")), key=len)
        rest = key.removeprefix(prefix)
        if ".resnets." in prefix:
            part, _, leaf = rest.removeprefix(".").partition(".")
            rest = f".{resnet[part]}.{leaf}"
        renamed[simple[prefix] + rest] = value
    return renamed
