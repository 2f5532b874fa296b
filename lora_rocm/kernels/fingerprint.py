"""Fingerprints of flat buffers that are read at every step: one int64 each, added up on the device.

A buffer is a row of 32-bit words, cut into tiles. The fingerprint is the sum, modulo 2**64, of each word times the odd
weight of its place in the tile times the odd weight of the tile. An odd weight times a changed power of two is never 0
modulo 2**64, so one flipped bit is always seen. Both weights are hashed, not linear, so words and tiles that were
moved, exchanged, zeroed or not written are seen as well. Integer sums do not depend on their order: both forms give the
same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lora_rocm.kernels.choice import Form
from lora_rocm.kernels.fingerprint_weights import BUFFERS_AT_ONCE, PLACE_FACTORS, TILE, TILE_FACTORS, WORDS_MULTIPLE

TILES_AT_ONCE = {"cpu": 16, "cuda": 1024}
"""In the plain form: their products take 8 bytes a word, which on the CPU should stay in its cache."""


def words_of(buffer_N: Tensor) -> Tensor:
    """A flat buffer as int32 words, in the same memory.

    Raises:
        ValueError: it cannot be read 16 bytes at once.
    """
    words = buffer_N.detach().view(torch.int32)
    if words.numel() % WORDS_MULTIPLE or words.data_ptr() % 16:
        raise ValueError(f"{words.numel()} words at {words.data_ptr():#x} are not rows of 16 bytes")
    return words


def add_fingerprints(words: Sequence[Tensor], found_K: Tensor, form: Form) -> None:
    """Add the fingerprint of each of K buffers to ``found_K``; waits for nothing, so it may be captured.

    Args:
        words: K times int32 [N], of any sizes (``words_of``).
        found_K: int64.
        form: see ``choice``.
    """
    if form == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_fingerprints

        for first in range(0, len(words), BUFFERS_AT_ONCE):
            some = slice(first, first + BUFFERS_AT_ONCE)
            launch_fingerprints(words[some], found_K[some])
    else:
        found_K.add_(torch.cat([_fingerprint(words_N) for words_N in words]))


def compare(found_K: Tensor, known_K: Tensor, changed_K: Tensor, changed: Tensor, form: Form) -> None:
    """Set what differs in ``changed_K``, where it stays set, and ``changed`` if anything is; ``found_K`` becomes 0.

    Args:
        found_K: int64, of the buffers as they are.
        known_K: int64, of the buffers as they should be.
        changed_K: float32, 0 or 1.
        changed: float32 0-d.
        form: see ``choice``.
    """
    if form == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_compare

        launch_compare(found_K, known_K, changed_K, changed)
        return
    torch.maximum(changed_K, (found_K != known_K).to(torch.float32), out=changed_K)
    torch.amax(changed_K, 0, out=changed)
    found_K.sub_(found_K)  # zero_ would be a memset, which some versions of ROCm leave out of graphs


def renew(found_K: Tensor, known_K: Tensor, held: Tensor, stays_K: Tensor, form: Form) -> None:
    """``known_K`` becomes ``found_K``, which becomes 0; where ``held`` is set, what should not have changed stays.

    Args:
        found_K: int64, of the buffers as they are.
        known_K: int64, of the buffers as they were.
        held: float32 0-d, 0 or 1.
        stays_K: float32, 1 where nothing may change while ``held`` is set.
        form: see ``choice``.
    """
    if form == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_renew

        launch_renew(found_K, known_K, held, stays_K)
        return
    known_K.copy_(torch.where(stays_K * held > 0, known_K, found_K))
    found_K.sub_(found_K)


def _fingerprint(words_N: Tensor) -> Tensor:
    """One buffer in plain PyTorch: int64 [1]."""
    device, tiles, rest = words_N.device, -(-words_N.numel() // TILE), words_N.numel() % TILE
    place_T, tile_M, sums = _place_weights(device), _tile_weights(tiles, device), []
    if words_N.numel() >= TILE:
        at_once = min(TILES_AT_ONCE["cpu" if device.type == "cpu" else "cuda"], tiles)
        products = torch.empty(at_once, TILE, dtype=torch.int64, device=device)
        rows = words_N[: words_N.numel() - rest].view(-1, TILE).split(at_once)
        sums = [torch.mul(some_MT, place_T, out=products[: len(some_MT)]).sum(1) for some_MT in rows]
    if rest:
        sums.append((words_N[-rest:] * place_T[:rest]).sum(0, keepdim=True))
    return (torch.cat(sums) * tile_M).sum(0, keepdim=True)


@cache
def _place_weights(device: torch.device) -> Tensor:
    """Odd int64 weights [TILE], each within 32 bits, no two of the same magnitude; kept, as graphs read them."""
    place_T = torch.arange(1, TILE + 1, dtype=torch.int64, device=device)
    place_T = _as_int32(place_T * PLACE_FACTORS[0])
    return _as_int32((place_T ^ (place_T >> 15)) * PLACE_FACTORS[1]) | 1


@cache
def _tile_weights(tiles: int, device: torch.device) -> Tensor:
    """Odd int64 weights [tiles]: xor-shift and multiply, as in splitmix64."""
    tile_M = torch.arange(1, tiles + 1, dtype=torch.int64, device=device) * TILE_FACTORS[0]
    tile_M = (tile_M ^ (tile_M >> 30)) * TILE_FACTORS[1]
    tile_M = (tile_M ^ (tile_M >> 27)) * TILE_FACTORS[2]
    return (tile_M ^ (tile_M >> 31)) | 1


def _as_int32(numbers: Tensor) -> Tensor:
    """As a 32-bit product wraps around."""
    return ((numbers + 2**31) & 0xFFFFFFFF) - 2**31
