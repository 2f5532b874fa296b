"""Triton kernel for the cross-entropy of tokens and its gradient. It reads the logits twice and writes them once.

See ``token_loss``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lora_rocm.kernels.backend import LAUNCH

BLOCK, WARPS = 4096, 8
LOWEST = tl.constexpr(-1e30)
"""Replaces minus infinity, because infinity minus infinity is NaN."""


@triton.jit
def _bent(value, factor, cap, CAP: tl.constexpr):
    """Return the logits times ``factor``, capped if CAP is set, and their derivative."""
    value = value * factor
    slope = factor
    if CAP:
        bent = 2.0 * tl.sigmoid(2.0 * value / cap) - 1.0
        value = bent * cap
        slope = factor * (1.0 - bent * bent)
    return value, slope


@triton.jit
def token_loss(logits, labels, losses, width, ignored, factor, cap, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the loss of a row, and overwrite the row with its gradient; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row).to(tl.int32)
    counts = label != ignored
    start, column = logits + row * width, tl.arange(0, BLOCK)
    # the largest logit, the sum of exponentials and the logit of the label, for each lane alone
    largest, total = tl.full([BLOCK], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    right = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + column < width
        value = _bent(tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32), factor, cap, CAP)[0]
        value = tl.where(inside, value, LOWEST)
        larger = tl.maximum(largest, value)
        total = total * tl.exp(largest - larger) + tl.exp(value - larger)
        largest = larger
        right += tl.where(first + column == label, value, 0.0)
    most = tl.max(largest, axis=0)
    normal = most + tl.log(tl.sum(total * tl.exp(largest - most), axis=0))
    tl.store(losses + row, tl.where(counts, normal - tl.sum(right, axis=0), 0.0))
    # second pass: softmax minus one-hot, times the slope of the cap
    for first in range(0, width, BLOCK):
        inside = first + column < width
        value, slope = _bent(
            tl.load(start + first + column, mask=inside, other=0.0).to(tl.float32), factor, cap, CAP
        )  # fmt: skip
        gradient = (tl.exp(value - normal) - tl.where(first + column == label, 1.0, 0.0)) * slope
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(start + first + column, gradient.to(logits.dtype.element_ty), mask=inside)


def launch(logits_NV: Tensor, labels_N: Tensor, ignored: int, scale: float, cap: float | None) -> Tensor:
    """Compute ``token_loss.to_loss_gradient`` in one launch, and return the losses."""
    losses_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    token_loss[(len(logits_NV),)](
        logits_NV, labels_N, losses_N, logits_NV.shape[1], ignored, scale, cap or 1.0,
        CAP=cap is not None, BLOCK=BLOCK, num_warps=WARPS, **LAUNCH,
    )  # fmt: skip
    return losses_N
