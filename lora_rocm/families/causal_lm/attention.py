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
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME, APART = "lora_rocm_causal", "apart_B1SS"
EIGHTH = 8


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each query to the keys at and before its place, or to the last ``sliding_window`` of these.

    ``apart_B1SS`` is added to the scores (``samples_apart``). With a cache there is one query, and the cache holds what
    it sees. ``s_aux``: a logit for each head, which takes part in the softmax and adds nothing to the output (gpt-oss).
    """
    queries, keys = query_BHQD.shape[2], key_BHKD.shape[2]
    mask = apart_B1SS
    if sliding_window is not None and 1 < queries and sliding_window < keys:
        seen_QK = _window(queries, keys, sliding_window, query_BHQD)
        mask = seen_QK[None, None] if mask is None else mask.masked_fill(~seen_QK, -torch.inf)
    if s_aux is not None:
        return _with_sinks(module, query_BHQD, key_BHKD, value_BHKD, dropout, scaling, mask, s_aux)
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


def _with_sinks(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    dropout: float,
    scaling: float | None,
    mask: Tensor | None,
    sinks_H: Tensor,
) -> tuple[Tensor, None]:
    """As ``causal``, with a first key that every query sees: its logit is the head's sink, its value zero.

    The logit is made by one more dimension: 1 in that key and 0 in the others, the sink in the queries. A first query
    that nobody reads keeps the places of the others, so no mask is needed.
    """
    batch, heads, queries, width = query_BHQD.shape
    scale = scaling or width**-0.5
    logits_BHQ = (sinks_H.to(query_BHQD.dtype) / scale)[None, :, None].expand(batch, heads, queries)
    more = int(queries > 1)
    wide = -width % EIGHTH + EIGHTH  # kernels of attention want such widths
    query = pad(torch.cat([query_BHQD, logits_BHQ[..., None]], dim=-1), (0, wide - 1, more, 0))
    key, value = pad(key_BHKD, (0, wide, 1, 0)), pad(value_BHKD, (0, wide, 1, 0))
    first_of_sink = torch.arange(width + wide, device=key.device) == width
    key = torch.cat([first_of_sink.to(key.dtype).expand_as(key[:, :, :1]), key[:, :, 1:]], dim=2)
    if mask is not None:  # nothing is added to the logit of the sink
        mask = pad(mask, (1, 0, 1, 0), value=float(mask.dtype == torch.bool))
    output_BQHD, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scale, is_causal=True
    )
    return output_BQHD[:, more:, :, :width], None


def _window(queries: int, keys: int, size: int, like: Tensor) -> Tensor:
    """Which of the keys each query sees: bool [Q, K]."""
    behind_QK = _places(queries, like)[:, None] - _places(keys, like)
    return (behind_QK >= 0) & (behind_QK < size)


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


AttentionInterface.register(NAME, causal)
