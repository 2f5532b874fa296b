"""Marks of SDXL base models."""

from __future__ import annotations

from lora_rocm.families.ldm.detect import Expected

EXPECTED = Expected(
    title="SDXL",
    with_article="an SDXL",
    family="sdxl",
    has_sizes=True,
    width=2048,
)
