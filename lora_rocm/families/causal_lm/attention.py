"""Causal attention without a mask for padding, registered with transformers as a separate implementation.

Samples are padded at the end, and no token sees later tokens, so the padding does not change trained tokens.
Transformers builds no mask for an implementation without a registered mask function. So a pass does not synchronise to
inspect a mask. Masks are still needed for a sliding window that is shorter than the sequence, and for several samples
in one row.

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
    """Attention of each query to the keys up to its position, or to the last ``sliding_window`` of these.

    ``apart_B1SS`` is added to the scores (``samples_apart``). With a cache there is one query, and the cache holds the
    keys that it sees. ``s_aux``: a logit per head that takes part in the softmax but adds nothing to the output
    (gpt-oss).
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
    """The bias on the scores of rows with several samples [B, 1, S, S]: 0 up to the token in its sample, else -inf.

    It is computed once for all layers. A boolean mask would be converted to a bias, and kept, by each layer.

    Args:
        positions_BS: the position of each token in its sample; 0 begins a sample.
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
    """As ``causal``, with an extra first key that every query sees: its logit is the head's sink, its value zero.

    The logit comes from one more dimension: 1 in that key and 0 in the others, the sink in the queries. An unused first
    query keeps the positions aligned, so no mask is needed.
    """
    batch, heads, queries, width = query_BHQD.shape
    scale = scaling or width**-0.5
    logits_BHQ = (sinks_H.to(query_BHQD.dtype) / scale)[None, :, None].expand(batch, heads, queries)
    more = int(queries > 1)
    wide = -width % EIGHTH + EIGHTH  # attention kernels need widths that are multiples of 8
    query = pad(torch.cat([query_BHQD, logits_BHQ[..., None]], dim=-1), (0, wide - 1, more, 0))
    key, value = pad(key_BHKD, (0, wide, 1, 0)), pad(value_BHKD, (0, wide, 1, 0))
    first_of_sink = torch.arange(width + wide, device=key.device) == width
    key = torch.cat([first_of_sink.to(key.dtype).expand_as(key[:, :, :1]), key[:, :, 1:]], dim=2)
    if mask is not None:  # the sink is never masked
        mask = pad(mask, (1, 0, 1, 0), value=float(mask.dtype == torch.bool))
    output_BQHD, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scale, is_causal=True
    )
    return output_BQHD[:, more:, :, :width], None


def _window(queries: int, keys: int, size: int, like: Tensor) -> Tensor:
    """True for the keys that each query sees: bool [Q, K]."""
    behind_QK = _places(queries, like)[:, None] - _places(keys, like)
    return (behind_QK >= 0) & (behind_QK < size)


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


AttentionInterface.register(NAME, causal)
