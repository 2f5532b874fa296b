"""Constants of the fingerprints, shared by plain PyTorch and the Triton kernels."""

from __future__ import annotations

TILE = 4096
"""Words per tile in both backends."""
WORDS_MULTIPLE = 16
"""The number of words of a buffer is a multiple of this, so that the kernel reads 16 bytes at once."""
MAX_BUFFERS = 8
"""Buffers that are compared together."""
BUFFERS_AT_ONCE = 6
"""Buffers that one launch of the kernel reads."""
PLACE_FACTORS = (-1640531535, -2048144777)
TILE_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
