"""Causal attention without a mask for padding, registered with transformers as an implementation of its own.

Samples are padded behind their end, and no token sees what is behind it: the padding changes nothing that is trained
on. Transformers makes no mask for an implementation that it has no maker of masks for, so a pass does not wait for the
device to look at one. Only a sliding window needs a mask, and only where a sequence is longer than it.

Dimensions: B batch, H heads, Q queries, K keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "lora_rocm_causal"
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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each query to the keys at and before its place, or to the last ``sliding_window`` of these.

    With a cache there is one query, and the cache holds what it sees. ``s_aux``: a logit for each head, which takes
    part in the softmax and adds nothing to the output (gpt-oss).
    """
    if s_aux is not None:
        return _with_sinks(module, query_BHQD, key_BHKD, value_BHKD, dropout, scaling, sliding_window, s_aux)
    queries, keys = query_BHQD.shape[2], key_BHKD.shape[2]
    mask = None
    if sliding_window is not None and 1 < queries and sliding_window < keys:
        mask = _window(queries, keys, sliding_window, query_BHQD)[None, None]
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query_BHQD, key_BHKD, value_BHKD, mask, dropout=dropout, scaling=scaling, is_causal=True
    )
    return output


def _with_sinks(
    module: nn.Module,
    query_BHQD: Tensor,
    key_BHKD: Tensor,
    value_BHKD: Tensor,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    sinks_H: Tensor,
) -> tuple[Tensor, None]:
    """As ``causal``, with a first key that every query sees: its logit is the head's sink, its value zero.

    The logit is made by one more dimension: 1 in that key and 0 in the others, the sink in the queries. A first query
    that nobody reads keeps the places of the others, so no mask is needed.
    """
    batch, heads, queries, width = query_BHQD.shape
    keys, scale = key_BHKD.shape[2], scaling or width**-0.5
    logits_BHQ = (sinks_H.to(query_BHQD.dtype) / scale)[None, :, None].expand(batch, heads, queries)
    more = int(queries > 1)
    wide = -width % EIGHTH + EIGHTH  # kernels of attention want such widths
    query = pad(torch.cat([query_BHQD, logits_BHQ[..., None]], dim=-1), (0, wide - 1, more, 0))
    key, value = pad(key_BHKD, (0, wide, 1, 0)), pad(value_BHKD, (0, wide, 1, 0))
    first_of_sink = torch.arange(width + wide, device=key.device) == width
    key = torch.cat([first_of_sink.to(key.dtype).expand_as(key[:, :, :1]), key[:, :, 1:]], dim=2)
    mask = None
    if sliding_window is not None and more and sliding_window < keys:
        mask = pad(_window(queries, keys, sliding_window, query), (1, 0, 1, 0), value=True)[None, None]
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
