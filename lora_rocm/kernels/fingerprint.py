"""Fingerprints of flat buffers, computed on the device at every step: one int64 per buffer.

A buffer is a sequence of 32-bit words, cut into tiles. The fingerprint is a sum of products modulo 2**64. Each product
has three factors: the word, the odd weight of its place in the tile, and the odd weight of the tile. An odd weight
times a changed power of two is never 0 modulo 2**64, so one flipped bit is always detected. Both weights are hashes,
not linear, so moved, exchanged, zeroed and unwritten words and tiles are detected as well. Integer sums do not depend
on their order, so both implementations give the same numbers on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.fingerprint_weights import BUFFERS_AT_ONCE, PLACE_FACTORS, TILE, TILE_FACTORS, WORDS_MULTIPLE

TILES_AT_ONCE = {"cpu": 16, "cuda": 1024}
"""Number of tiles that plain PyTorch computes at once, for each device type. The products take 8 bytes per word, and
should fit into the CPU's cache.
"""


def words_of(buffer_N: Tensor) -> Tensor:
    """View a flat buffer as int32 words.

    Raises:
        ValueError: the kernel cannot read the buffer in units of 16 bytes, because of its size or address.
    """
    words = buffer_N.detach().view(torch.int32)
    if words.numel() % WORDS_MULTIPLE or words.data_ptr() % 16:
        raise ValueError(f"{words.numel()} words at {words.data_ptr():#x} cannot be read 16 bytes at a time")
    return words


def add_fingerprints(words: Sequence[Tensor], found_K: Tensor, implementation: Implementation) -> None:
    """Add the fingerprint of each of K buffers to ``found_K``. Does not synchronise, so a graph can capture it.

    Args:
        words: K buffers of any sizes, each int32 [N] (``words_of``).
        found_K: int64 sums to add to.
        implementation: see ``backend``.
    """
    if implementation == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_fingerprints

        for first in range(0, len(words), BUFFERS_AT_ONCE):
            some = slice(first, first + BUFFERS_AT_ONCE)
            launch_fingerprints(words[some], found_K[some])
    else:
        found_K.add_(torch.cat([_fingerprint(words_N) for words_N in words]))


def compare(
    found_K: Tensor, known_K: Tensor, changed_K: Tensor, changed: Tensor, implementation: Implementation
) -> None:
    """Mark the buffers with a wrong fingerprint, set ``changed`` to 1 if any buffer is marked, and zero ``found_K``.

    Args:
        found_K: int64, current fingerprints.
        known_K: int64, expected fingerprints.
        changed_K: float32, 1 for marked buffers, else 0; marks are never removed.
        changed: float32 0-d, overwritten by 1 or 0.
        implementation: see ``backend``.
    """
    if implementation == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_compare

        launch_compare(found_K, known_K, changed_K, changed)
        return
    torch.maximum(changed_K, (found_K != known_K).to(torch.float32), out=changed_K)
    torch.amax(changed_K, 0, out=changed)
    found_K.sub_(found_K)  # zero_ would be a memset, which graphs lack in some versions of ROCm


def renew(found_K: Tensor, known_K: Tensor, held: Tensor, stays_K: Tensor, implementation: Implementation) -> None:
    """Make the current fingerprints the expected ones, except for buffers that must not change. Zero ``found_K``.

    Args:
        found_K: int64, current fingerprints.
        known_K: int64, expected fingerprints, overwritten.
        held: float32 0-d; if it is 1, the buffers in ``stays_K`` keep their expected fingerprints.
        stays_K: float32, 1 for buffers that must not change while ``held`` is 1, else 0.
        implementation: see ``backend``.
    """
    if implementation == "triton":
        from lora_rocm.kernels.fingerprint_triton import launch_renew

        launch_renew(found_K, known_K, held, stays_K)
        return
    known_K.copy_(torch.where(stays_K * held > 0, known_K, found_K))
    found_K.sub_(found_K)


def _fingerprint(words_N: Tensor) -> Tensor:
    """Return the fingerprint of one buffer, computed in plain PyTorch: int64 [1]."""
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
    """Return odd int64 weights [TILE] within 32 bits and with distinct magnitudes.

    They are cached, as captured graphs read them.
    """
    place_T = torch.arange(1, TILE + 1, dtype=torch.int64, device=device)
    place_T = _as_int32(place_T * PLACE_FACTORS[0])
    return _as_int32((place_T ^ (place_T >> 15)) * PLACE_FACTORS[1]) | 1


@cache
def _tile_weights(tiles: int, device: torch.device) -> Tensor:
    """Return odd int64 weights [tiles], hashed by xor-shift and multiply as in splitmix64."""
    tile_M = torch.arange(1, tiles + 1, dtype=torch.int64, device=device) * TILE_FACTORS[0]
    tile_M = (tile_M ^ (tile_M >> 30)) * TILE_FACTORS[1]
    tile_M = (tile_M ^ (tile_M >> 27)) * TILE_FACTORS[2]
    return (tile_M ^ (tile_M >> 31)) | 1


def _as_int32(numbers: Tensor) -> Tensor:
    """Wrap int64 numbers to the range of int32, as 32-bit arithmetic does."""
    return ((numbers + 2**31) & 0xFFFFFFFF) - 2**31
