"""Causal attention without a padding mask, registered with transformers as a separate implementation.

Samples are padded at the end, and no token attends to later tokens, so the padding does not change trained tokens.
Transformers builds no mask for an implementation without a registered mask function, so the forward pass does not
synchronise to inspect a mask. Masks are still used in two cases: a sliding window that is shorter than the sequence,
and several samples in one row.

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
    """Compute attention of each query to the keys up to its position, or to the last ``sliding_window`` keys.

    ``apart_B1SS`` is the bias from ``samples_apart``, which is added to the scores. With a KV cache there is one query,
    and the cache holds exactly the keys that it attends to. ``s_aux`` has one logit per head that is part of the
    softmax but adds nothing to the output (gpt-oss).

    Returns:
        The output [B, Q, H, D], and None in place of the attention weights.
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
    """Return the attention bias for rows with several samples, shape [B, 1, S, S].

    It is 0 for keys of the query's sample up to the query, else -inf. It is computed once for all layers. With a
    boolean mask, each layer would convert the mask to a bias and keep it.

    Args:
        positions_BS: position of each token in its sample; a 0 begins a sample.
        dtype: dtype of the queries.
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
    """Same as ``causal``, but with an extra first key that all queries attend to.

    The extra key's logit is the head's sink, and its value is zero. Queries and keys get one more dimension for this.
    In this dimension the extra key is 1, the other keys are 0, and the queries have the sink. An unused first query
    keeps the positions aligned, so no mask is needed.
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
    """Return a bool mask [Q, K]: True for the keys that each query attends to."""
    behind_QK = _places(queries, like)[:, None] - _places(keys, like)
    return (behind_QK >= 0) & (behind_QK < size)


def _places(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


AttentionInterface.register(NAME, causal)
