"""LyCORIS' LoCon with weight decomposition, written from its formulas: the stored tensors and the resulting weight.

Shares nothing with the reader. LyCORIS 4.1 ``modules/locon.py``: ``scale = alpha / rank``; ``dora_scale`` starts as the
norms of the base weight, [out, 1, ...] with ``wd_on_output``, else [1, in, 1, ...]; the merged weight is ``(W + update)
* dora_scale / norm(W + update)`` along the same axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float32).eps


def locon(
    weight: Tensor, rank: int, rng: torch.Generator, alpha: float = 2.0, wd_on_output: bool | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """(what LyCORIS stores of one module, its merged weight); ``wd_on_output`` None: no weight decomposition."""
    outputs, inputs, *kernel = weight.shape
    down = torch.randn(rank, inputs, *kernel, generator=rng) * 0.3
    up = torch.randn(outputs, rank, *[1] * len(kernel), generator=rng) * 0.3
    stored = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(alpha)}
    moved = weight.clone()
    for o in range(outputs):  # entry by entry of the product, not as the reader does it
        moved[o] += alpha / rank * sum(up[o, r].reshape(()) * down[r] for r in range(rank))
    if wd_on_output is None:
        return stored, moved
    dims = [d for d in range(weight.ndim) if d != (0 if wd_on_output else 1)]
    norms = weight.square().sum(dim=dims, keepdim=True).sqrt()
    stored["dora_scale"] = norms * (1 + 0.2 * torch.randn(norms.shape, generator=rng))
    return stored, moved * stored["dora_scale"] / (moved.square().sum(dim=dims, keepdim=True).sqrt() + EPS)
