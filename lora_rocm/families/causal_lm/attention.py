"""Causal attention without a mask for padding, registered with transformers as an implementation of its own.

Samples are padded behind their end, and no token sees what is behind it: the padding changes nothing that is trained
on. Transformers makes no mask for an implementation that it has no maker of masks for, so a pass does not wait for the
device to look at one. A sliding window needs a mask where a sequence is longer than it, and so do
several samples in one row.

Dimensions: B batch, H heads, Q queries, K keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME, APART = "lora_rocm_causal", "apart_B1SS"


def causal(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    apart_B1SS: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each query to the keys at and before its place, or to the last ``sliding_window`` of these.

    ``apart_B1SS`` is added to the scores (``samples_apart``). With a cache there is one query, and the cache holds what
    it sees.
    """
    queries, keys = query_BHQD.shape[2], key_BHKD.shape[2]
    mask = apart_B1SS
    if sliding_window is not None and 1 < queries and sliding_window < keys:
        behind_QK = _places(queries, query_BHQD)[:, None] - _places(keys, query_BHQD)
        seen_QK = (behind_QK >= 0) & (behind_QK < sliding_window)
        mask = seen_QK[None, None] if mask is None else mask.masked_fill(~seen_QK, -torch.inf)
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query_BHQD, key_BHKD, value_BHKD, mask, dropout=dropout, scaling=scaling, is_causal=True
    )
    return output


def samples_apart(positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of rows with several samples [B, 1, S, S]: 0 within a sample, to its past, or -inf.

    It is made once for all layers, and as a sum, because a layer would keep what it makes of a mask of truth values.

    Args:
        positions_BS: the place of each token in its sample; 0 begins a sample.
        dtype: of the queries.
    """
    sample_BS = (positions_BS == 0).cumsum(1)
    seen_BSS = (sample_BS[:, :, None] == sample_BS[:, None, :]).tril()
    return torch.zeros_like(seen_BSS, dtype=dtype).masked_fill(~seen_BSS, -torch.inf)[:, None]


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


AttentionInterface.register(NAME, causal)
