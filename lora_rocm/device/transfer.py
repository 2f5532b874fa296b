"""The only door between host and device, and the check of what went through it.

A fingerprint is one int64 a sample: the wrap-around sum of the sample's bytes, read as integer words, each times an odd
weight that depends on its position. An odd weight times a changed power of two is never 0 mod 2**64, so one flipped bit
is always seen; weights that are hashed, not linear, in the position make moved tiles and shifted rows visible too. It
compares bytes: NaN, -0 and an all-zero tensor need no special case.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

WORD_DTYPES = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(tensor_B: Tensor) -> Tensor:
    """Fingerprint of each sample, on the device where the tensor lies.

    Args:
        tensor_B: any dtype, first dimension B.

    Returns:
        int64 of shape [B]; the same on every device, for the same bytes.
    """
    words_BN = _words(tensor_B)
    weights_N = _weights(words_BN.shape[1], words_BN.device)
    return (words_BN.to(torch.int64) * weights_N).sum(dim=1)


def _words(tensor_B: Tensor) -> Tensor:
    """The bytes of each sample as integer words, the widest that divide a sample's size (at most 4 bytes)."""
    flat_BN = tensor_B.detach().contiguous().reshape(tensor_B.shape[0], -1)
    sample_bytes = flat_BN.shape[1] * flat_BN.element_size()
    word_bytes = next(size for size in WORD_DTYPES if sample_bytes % size == 0)
    return flat_BN.view(torch.uint8).view(WORD_DTYPES[word_bytes])


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """Odd, position-dependent int64 weights [count]: a hash of the position (xor-shift and multiply, as in splitmix64)."""
    mixed_N = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    mixed_N = (mixed_N ^ (mixed_N >> 30)) * -0x40A7B892E31B1A47
    mixed_N = (mixed_N ^ (mixed_N >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed_N ^ (mixed_N >> 31)) | 1
