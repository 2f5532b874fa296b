"""Keeps the low-rank updates of modules below a norm (max-norm regularisation), on the device without synchronisation.

Dimensions: n modules of one shape, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor, float]


class NormLimit:
    """Scales A and B of each module whose norm of ``scale * B @ A`` is too large, both by the same factor.

    Args:
        pairs: (A [R, I...], B [O, R...], scale) of each module: the trained weights, which are changed in place.
        most: the norm, in the Frobenius norm.
    """

    def __init__(self, pairs: Sequence[Pair], most: float) -> None:
        self._most = most
        stacks: dict[tuple[torch.Size, torch.Size], list[Pair]] = {}
        for pair in pairs:
            stacks.setdefault((pair[0].shape, pair[1].shape), []).append(pair)
        self._stacks = list(stacks.values())

    @torch.no_grad()
    def apply(self, held: Tensor) -> None:
        """Scale down what is too large. ``held``: float32 0-d, 0 or 1; if it is 1, no bit changes."""
        for stack in self._stacks:
            downs, ups, scales = zip(*stack, strict=True)
            down_nRI, up_nOR = (torch.stack(tensors).float().flatten(2) for tensors in (downs, ups))
            # the norm of a product from the small Gram matrices of its factors
            products_nRR = (down_nRI @ down_nRI.mT) * (up_nOR.mT @ up_nOR)
            norms_n = products_nRR.sum((1, 2)).clamp(min=0).sqrt() * products_nRR.new_tensor(scales)
            divisors_n = (norms_n / self._most).clamp(min=1).sqrt()  # exactly 1 where nothing is to change
            divisors = torch.where(held > 0, torch.ones_like(divisors_n), divisors_n).unbind()
            for weight, divisor in zip((*downs, *ups), (*divisors, *divisors), strict=True):
                weight.div_(divisor)
