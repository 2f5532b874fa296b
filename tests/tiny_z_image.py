"""Random tiny Z-Image models as diffusers folders: two layers, width 32, and a Qwen3 of three layers.

The tokenizer is a byte-level BPE without merges: a letter is a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from tests.tiny_models import tiny_vae, written_once

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WIDTH, CHANNELS = 16, 4
VAE: dict[str, Any] = {
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "block_out_channels": (4, 4, 4, 4),
    "norm_num_groups": 2,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def tiny_tokenizer() -> Any:
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], unk_token=None, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


def tiny_transformer(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": CHANNELS,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": WIDTH,
        "axes_dims": [8, 4, 4],
        "axes_lens": [600, 64, 64],
    }
    transformer: Any = ZImageTransformer2DModel(**(config | changes))
    with torch.no_grad():  # norms and pad tokens of a new model are neutral, so a wrong one would not be seen
        for parameter in transformer.parameters():
            if parameter.ndim == 1 or parameter.shape[0] == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return transformer


def tiny_z_image(seed: int = 0, transformer: dict[str, Any] | None = None) -> Any:
    """A random tiny pipeline; the same seed gives the same weights."""
    text = Qwen3Config(
        vocab_size=260,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=tiny_vae(
                scaling_factor=0.3611, shift_factor=0.1159, block_out_channels=(4, 4, 4, 4), norm_num_groups=2
            ),
            text_encoder=Qwen3Model(text),
            tokenizer=tiny_tokenizer(),
            transformer=tiny_transformer(**(transformer or {})),
        )


def write_tiny_z_image(folder: Path, seed: int = 0, **transformer: Any) -> Path:
    """Write a random tiny model as a diffusers folder and return the folder."""

    def write() -> None:
        tiny_z_image(seed, transformer).save_pretrained(folder, safe_serialization=True)

    return written_once(folder, f"z-image {seed} {transformer}", write)
