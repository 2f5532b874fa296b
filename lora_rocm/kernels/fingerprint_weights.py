"""Constants of the fingerprints, shared by the plain PyTorch and the Triton implementation."""

from __future__ import annotations

TILE = 4096
"""Number of words in a tile, in both implementations."""
WORDS_MULTIPLE = 16
"""A buffer's number of words must be a multiple of this, because the kernel reads 16 bytes at a time."""
MAX_BUFFERS = 8
"""Maximum number of buffers that are compared together."""
BUFFERS_AT_ONCE = 6
"""Maximum number of buffers that one launch of the kernel reads."""
PLACE_FACTORS = (-1640531535, -2048144777)
TILE_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
