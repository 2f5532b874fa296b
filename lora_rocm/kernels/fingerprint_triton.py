"""Triton kernels for fingerprints of several buffers. One launch reads each byte once. See ``fingerprint``.

Weights are computed in registers, because reading them from a table would cost as much as reading the data. Words have
32 bits, because RDNA GPUs multiply 64-bit numbers in several steps; only the sums have 64 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from lora_rocm.kernels import fingerprint_weights
from lora_rocm.kernels.backend import LAUNCH
from lora_rocm.kernels.fingerprint_weights import BUFFERS_AT_ONCE, MAX_BUFFERS

WARPS = 4
WIDTH = MAX_BUFFERS  # block size of the kernels with one number per buffer; a power of two
TILE = tl.constexpr(fingerprint_weights.TILE)
PLACE_1, PLACE_2 = (tl.constexpr(factor) for factor in fingerprint_weights.PLACE_FACTORS)
TILE_1, TILE_2, TILE_3 = (tl.constexpr(factor) for factor in fingerprint_weights.TILE_FACTORS)


@triton.jit
def _tile_weight(tile):
    mixed = (tile.to(tl.int64) + 1) * TILE_1
    mixed = (mixed ^ (mixed >> 30)) * TILE_2
    mixed = (mixed ^ (mixed >> 27)) * TILE_3
    return (mixed ^ (mixed >> 31)) | 1


@triton.jit
def add_fingerprints(
    words_0, words_1, words_2, words_3, words_4, words_5, count_0, count_1, count_2, count_3, count_4, count_5, found
):
    """Add the fingerprints of up to six buffers to ``found``; one program per tile and buffer."""
    tile, buffer = tl.program_id(0), tl.program_id(1)
    address, count = words_0.to(tl.int64), count_0.to(tl.int64)  # large counts arrive as int64, and all need one type
    if buffer == 1:
        address, count = words_1.to(tl.int64), count_1.to(tl.int64)
    elif buffer == 2:
        address, count = words_2.to(tl.int64), count_2.to(tl.int64)
    elif buffer == 3:
        address, count = words_3.to(tl.int64), count_3.to(tl.int64)
    elif buffer == 4:
        address, count = words_4.to(tl.int64), count_4.to(tl.int64)
    elif buffer == 5:
        address, count = words_5.to(tl.int64), count_5.to(tl.int64)
    # Addresses are selected as numbers, because Triton 3.6 cannot compile a selection of pointers for AMD GPUs.
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    first = tile.to(tl.int64) * TILE
    if first < count:
        place = tl.arange(0, TILE)
        word = tl.load(words + first + place, mask=first + place < count, other=0)
        weight = (place + 1) * PLACE_1
        weight = ((weight ^ (weight >> 15)) * PLACE_2) | 1
        total = tl.sum(word.to(tl.int64) * weight.to(tl.int64), axis=0)
        tl.atomic_add(found + buffer, total * _tile_weight(tile), sem="relaxed")


@triton.jit
def compare(found, known, changed_K, changed, buffers, WIDTH: tl.constexpr):
    """Compute ``fingerprint.compare`` for all buffers in one program."""
    buffer = tl.arange(0, WIDTH)
    inside = buffer < buffers
    now = tl.load(found + buffer, mask=inside, other=0)
    before = tl.load(known + buffer, mask=inside, other=0)
    was = tl.load(changed_K + buffer, mask=inside, other=0.0)
    verdict = tl.where(now != before, 1.0, was)
    tl.store(changed_K + buffer, verdict, mask=inside)
    tl.store(changed, tl.max(verdict, axis=0))
    tl.store(found + buffer, now - now, mask=inside)


@triton.jit
def renew(found, known, held, stays, buffers, WIDTH: tl.constexpr):
    """Compute ``fingerprint.renew`` for all buffers in one program."""
    buffer = tl.arange(0, WIDTH)
    inside = buffer < buffers
    now = tl.load(found + buffer, mask=inside, other=0)
    before = tl.load(known + buffer, mask=inside, other=0)
    stay = tl.load(stays + buffer, mask=inside, other=0.0) * tl.load(held)
    tl.store(known + buffer, tl.where(stay > 0, before, now), mask=inside)
    tl.store(found + buffer, now - now, mask=inside)


def launch_fingerprints(words: Sequence[Tensor], found_K: Tensor) -> None:
    """Compute ``fingerprint.add_fingerprints`` in one launch, for at most BUFFERS_AT_ONCE buffers."""
    counts = [words_N.numel() for words_N in words]
    unused = BUFFERS_AT_ONCE - len(words)
    places, sizes = [*words, *[words[0]] * unused], [*counts, *[0] * unused]
    grid = (triton.cdiv(max(counts), fingerprint_weights.TILE), len(words))
    add_fingerprints[grid](*places, *sizes, found_K, num_warps=WARPS, **LAUNCH)


def launch_compare(found_K: Tensor, known_K: Tensor, changed_K: Tensor, changed: Tensor) -> None:
    """Compute ``fingerprint.compare`` in one launch."""
    compare[(1,)](found_K, known_K, changed_K, changed, len(found_K), WIDTH=WIDTH, num_warps=1, **LAUNCH)


def launch_renew(found_K: Tensor, known_K: Tensor, held: Tensor, stays_K: Tensor) -> None:
    """Compute ``fingerprint.renew`` in one launch."""
    renew[(1,)](found_K, known_K, held, stays_K, len(found_K), WIDTH=WIDTH, num_warps=1, **LAUNCH)
