"""Detects the model family of a LoRA file from its tensor names, so that an error can name it.

Recognises the names that kohya-ss/sd-scripts, musubi-tuner, diffusers, ai-toolkit and ComfyUI write (``comfy/lora.py``,
``comfy/lora_convert.py``); dots and underscores are treated as equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from lora_rocm.families.registry import PRODUCT

SAMPLED = 4000
"""Maximum number of names inspected per file. No LoRA has more names that are not repetitions."""


@dataclass(frozen=True)
class Origin:
    """One or more families with distinctive module names.

    families: values of ``model.family``. title: display name. pattern: regular expression to find in the names, with
    dots as ``_``. without: regular expression that must not be found in any name.
    """

    families: tuple[str, ...]
    title: str
    pattern: str
    without: str = ""


ORIGINS: tuple[Origin, ...] = (
    Origin(("flux2",), "FLUX.2", r"double_stream_modulation|single_stream_modulation|to_qkv_mlp_proj"),
    Origin(("flux", "chroma"), "FLUX.1", r"(double|single)_blocks_\d+_|single_transformer_blocks_\d+_"),
    Origin(("sd3",), "Stable Diffusion 3", r"joint_blocks_\d+_"),
    Origin(("qwen-image",), "Qwen-Image", r"transformer_blocks_\d+_(img|txt)_(mlp|mod)"),
    Origin(
        ("flux", "chroma", "sd3"),
        "FLUX.1 or Stable Diffusion 3",
        r"transformer_blocks_\d+_(attn_add_|attn_to_add_out|ff_context)",
    ),
    Origin(("z-image",), "Z-Image", r"(noise_refiner|context_refiner)_\d+_|(^|_)layers_\d+_attention_(to_|qkv|out)"),
    Origin(("ltx2",), "LTX-2", r"(audio_to_video|video_to_audio)_attn"),
    Origin(("wan", "anima"), "Wan", r"(^|_)(?<!\d_transformer_)blocks_\d+_(self_attn|cross_attn|ffn|attn[12])_"),
    Origin(("sdxl",), "SDXL", r"lora_te2_|text_encoder_2_|lora_unet_(input|middle|output)_blocks?_"),
    Origin(("sd15", "sd2"), "Stable Diffusion 1 or 2", r"^lora_te_text_model_"),
    Origin(
        ("causal-lm",),
        "a language model",
        r"(^|_)layers_\d+_(self_attn_[qkvo]_proj|mlp_(gate|up|down)_proj)",
        without=r"encoder_layers_|text_model",
    ),
)
"""Checked in order; the first match wins. Names shared by several families match none."""


def origin_of(names: Iterable[str]) -> Origin | None:
    """Return the origin that matches these tensor names; None if the names are ambiguous."""
    text = "\n".join(name.replace(".", "_") for name in islice(names, SAMPLED))
    for origin in ORIGINS:
        if re.search(origin.pattern, text, re.MULTILINE) and not (origin.without and re.search(origin.without, text)):
            return origin
    return None


def foreign(names: Iterable[str], family: str) -> Origin | None:
    """Return the origin of the names if it excludes ``family``; None if it includes it or is unknown."""
    origin = origin_of(names)
    return None if origin is None or family in origin.families else origin


def title_of(family: str) -> str:
    """Return the display name of a family."""
    return PRODUCT[family].title if family in PRODUCT else family
