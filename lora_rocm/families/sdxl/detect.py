"""Marks of SDXL base models."""

from __future__ import annotations

from lora_rocm.families.ldm.detect import SDXL, Expected

EXPECTED = Expected(
    title="SDXL",
    with_article="an SDXL",
    own=frozenset({SDXL}),
    pipeline="StableDiffusionXL",
    text_prefix="conditioner.embedders.1.",
    has_sizes=True,
    width=2048,
)
