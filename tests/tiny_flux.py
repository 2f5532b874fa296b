"""Random tiny FLUX.1 models as diffusers folders: a block of each kind, width 32, a CLIP and a T5 of one layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from tests.tiny_models import END, text_config, tiny_vae, vocabulary, written_once

CHANNELS, CLIP_WIDTH, T5_WIDTH = 4, 32, 16
LETTERS = "▁abcdefghijklmnopqrstuvwxyz,.0123456789"
VAE: dict[str, Any] = {
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "block_out_channels": (4, 4, 4, 4),
    "norm_num_groups": 2,
}


def tiny_transformer(**changes: Any) -> Any:
    config: dict[str, Any] = {
        "in_channels": 4 * CHANNELS,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": T5_WIDTH,
        "pooled_projection_dim": CLIP_WIDTH,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8),
    }
    transformer: Any = FluxTransformer2DModel(**(config | changes))
    with torch.no_grad():  # the norms of a new model are neutral, so a wrong one would not be seen
        for parameter in transformer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
    return transformer


def tiny_t5_tokenizer(extra_ids: int = 100) -> Any:
    """A letter is a token."""
    pieces = [(piece, 0.0) for piece in ("<pad>", "</s>", "<unk>")] + [(letter, -3.0) for letter in LETTERS]
    return T5Tokenizer(vocab=pieces, extra_ids=extra_ids)


def tiny_flux(seed: int = 0, schnell: bool = False) -> Any:
    """A random tiny pipeline; the same seed gives the same weights."""
    vocab, merges = vocabulary()
    text = T5Config(
        vocab_size=200,
        d_model=T5_WIDTH,
        d_ff=24,
        d_kv=8,
        num_heads=2,
        num_layers=1,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    shifts: dict[str, Any] = {} if schnell else {"use_dynamic_shifting": True, "shift": 3.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**shifts),
            vae=tiny_vae(**VAE),
            text_encoder=CLIPTextModel(text_config(CLIP_WIDTH, vocab, vocab[END])),
            tokenizer=CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77, pad_token=END),
            text_encoder_2=T5EncoderModel(text),
            tokenizer_2=tiny_t5_tokenizer(),
            transformer=tiny_transformer(guidance_embeds=not schnell),
        )


def write_tiny_flux(folder: Path, seed: int = 0, schnell: bool = False) -> Path:
    """Write a random tiny model as a diffusers folder and return the folder."""
    how = f"flux {seed} {schnell}"
    return written_once(folder, how, lambda: tiny_flux(seed, schnell).save_pretrained(folder, safe_serialization=True))
