"""Build the parts of the tiny Z-Image, and write and read them as one diffusers folder."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, Qwen2Tokenizer, Qwen3Config, Qwen3Model
from words import nonsense

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen's chat template, without its tools and thinking.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHIFT = 2.0
TEXT_WIDTH = 64


@dataclass
class Parts:
    """All components of a ZImagePipeline."""

    tokenizer: Any
    text_encoder: Qwen3Model
    transformer: ZImageTransformer2DModel
    vae: AutoencoderKL

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The trained modules."""
        return {"text_encoder": self.text_encoder, "transformer": self.transformer, "vae": self.vae}


def train_tokenizer(captions: list[str], seed: int) -> Any:
    """Qwen's kind of tokenizer (byte-level BPE), trained on captions, the chat's words, and made-up words."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    plain = Qwen2Tokenizer(vocab=letters, merges=[], unk_token=None, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    plain.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    rng = np.random.default_rng((seed, 5))
    made_up = [" " + nonsense(rng) for _ in range(max(200, len(captions) // 3))]
    chat = ["user\n", "assistant\n"] * len(captions)
    tokenizer = plain.train_new_from_iterator([*captions, *made_up, *chat], vocab_size=768, show_progress=False)
    tokenizer.chat_template = CHAT
    return tokenizer


def build(folder: Path, captions: list[str], seed: int, toy: bool) -> Parts:
    """Fresh parts."""
    tokenizer = train_tokenizer(captions, seed)
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=3 * TEXT_WIDTH,
        num_hidden_layers=4,  # Z-Image reads the states before the last one
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=128,
        n_layers=1 if toy else 7,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=TEXT_WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[1024, 128, 128],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token, std=0.02)  # the class leaves them as memory was
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8) if toy else (16, 32, 48, 64),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=128,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return Parts(tokenizer, Qwen3Model(text), transformer, vae)


def load(folder: Path) -> Parts:
    """The parts of a saved folder, in fp32."""
    pipe = ZImagePipeline.from_pretrained(folder, dtype=torch.float32)
    return Parts(AutoTokenizer.from_pretrained(folder / "tokenizer"), pipe.text_encoder, pipe.transformer, pipe.vae)


def save(parts: Parts, folder: Path) -> None:
    """Write the diffusers folder as bf16 safetensors and leave the parts in fp32 as they were."""
    half = {name: copy.deepcopy(module).cpu().bfloat16() for name, module in parts.modules.items()}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    ZImagePipeline(scheduler=scheduler, tokenizer=parts.tokenizer, **half).save_pretrained(folder)
