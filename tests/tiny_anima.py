"""Random tiny Anima models as diffusers folders: two blocks of width 32, a conditioner and a Qwen3 of few layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import Qwen3Config, Qwen3Model

from tests.tiny_flux import tiny_t5_tokenizer
from tests.tiny_models import written_once
from tests.tiny_z_image import tiny_tokenizer

CHANNELS, WIDTH = 4, 16
MEAN, STD = [-0.7, 0.4, 0.1, 1.5], [2.8, 1.4, 0.6, 1.9]


def tiny_transformer(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": WIDTH,
        "adaln_lora_dim": 4,
        "max_size": (4, 16, 16),
        "rope_scale": (1.0, 4.0, 4.0),
        "extra_pos_embed_type": None,
    }
    return CosmosTransformer3DModel(**(config | changes))


def tiny_anima(seed: int = 0) -> Any:
    """A random tiny pipeline; the same seed gives the same weights."""
    text = Qwen3Config(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    pipeline = AnimaAutoBlocks().init_pipeline()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = {
            "text_encoder": Qwen3Model(text),
            "text_conditioner": AnimaTextConditioner(
                source_dim=WIDTH,
                target_dim=WIDTH,
                model_dim=WIDTH,
                num_layers=1,
                num_attention_heads=2,
                target_vocab_size=128,
            ),
            "transformer": tiny_transformer(),
            "vae": AutoencoderKLQwenImage(
                base_dim=2, z_dim=CHANNELS, dim_mult=[1, 2, 4, 4], latents_mean=MEAN, latents_std=STD
            ),
        }
        with torch.no_grad():  # norms and modulation of a new model are neutral, so a wrong one would not be seen
            for name in ("text_conditioner", "transformer"):
                for key, parameter in parts[name].named_parameters():
                    if parameter.ndim == 1 or ".linear_" in key:
                        parameter.add_(0.5 * torch.randn_like(parameter))
    pipeline.update_components(
        tokenizer=tiny_tokenizer(),
        t5_tokenizer=tiny_t5_tokenizer(80),  # the table of the conditioner has 128 rows
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **parts,
    )
    return pipeline


def write_tiny_anima(folder: Path, seed: int = 0) -> Path:
    """Write a random tiny model as a diffusers folder and return the folder."""
    how = {"safe_serialization": True, "overwrite_modular_index": True}
    return written_once(folder, f"anima {seed}", lambda: tiny_anima(seed).save_pretrained(str(folder), **how))
