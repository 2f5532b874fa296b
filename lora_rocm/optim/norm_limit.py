"""Limits the norm of each module's update (max-norm regularisation), on the device without synchronisation.

An update is ``scale`` times a product of all of a module's tensors, each to the first power.
Dimensions: n modules of one shape, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lora_rocm.device.constants import constant

Factors = Mapping[str, Tensor]
Norms = Callable[[Sequence[Factors]], Tensor]
"""Function that returns the Frobenius norms, float32 [n], of the products of n modules with one shape."""


def norms_of_pairs(pairs: Sequence[Factors]) -> Tensor:
    """Return the norms of ``B @ A`` (a ``Norms`` function), with the factors lora_A [R, I...] and lora_B [O, R...]."""
    stacks = (torch.stack([pair[role] for pair in pairs]) for role in ("lora_A", "lora_B"))
    down_nRI, up_nOR = (stack.float().flatten(2) for stack in stacks)
    # the norm of a product from the small Gram matrices of its factors
    products_nRR = (down_nRI @ down_nRI.mT) * (up_nOR.mT @ up_nOR)
    norms_n: Tensor = products_nRR.sum((1, 2)).clamp(min=0).sqrt()
    return norms_n


class NormLimit:
    """Scales down modules with too large an update: multiplies all tensors of a module by the same factor.

    Args:
        modules: (factors by role, scale) of each module. The factors are the trained weights, and are changed in place.
        most: largest allowed Frobenius norm of an update.
        norms: function that computes the norms of the factors' products.
    """

    def __init__(self, modules: Sequence[tuple[Factors, float]], most: float, norms: Norms = norms_of_pairs) -> None:
        self._most, self._norms = most, norms
        stacks: dict[tuple[tuple[str, torch.Size], ...], list[tuple[Factors, float]]] = {}
        for factors, scale in modules:
            shapes = tuple((role, factor.shape) for role, factor in factors.items())
            stacks.setdefault(shapes, []).append((factors, scale))
        self._stacks: list[tuple[list[Factors], Tensor]] = []  # modules of one shape, and their scales [n]
        for stack in stacks.values():
            like = next(iter(stack[0][0].values()))
            scales_n = torch.tensor([scale for _, scale in stack], dtype=torch.float32, device=like.device)
            self._stacks.append(([factors for factors, _ in stack], constant(scales_n, "scales of the norm limit")))

    @torch.no_grad()
    def apply(self, held: Tensor) -> None:
        """Scale down modules with too large an update.

        ``held``: whether to keep all weights unchanged, bit for bit: float32 0-d, 0 or 1.
        """
        for modules, scales_n in self._stacks:
            # exactly 1 where the norm is within the limit
            divisors_n = (self._norms(modules) * scales_n / self._most).clamp(min=1).pow(1 / len(modules[0]))
            divisors_n = torch.where(held > 0, torch.ones_like(divisors_n), divisors_n)
            for role in modules[0]:  # one stack for all modules: few launches
                factors = [module[role] for module in modules]
                divided = torch.stack(factors) / divisors_n.view(-1, *[1] * factors[0].ndim)  # float32
                torch._foreach_copy_(factors, list(divided.unbind()))
