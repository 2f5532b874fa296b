"""Kernels that give wrong answers, which the self-test has to notice. The references (float64) stay right."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Fault = Callable[[Tensor, Tensor | None], Tensor]
"""(what the kernel gave, what it gave the time before for this shape and format) -> what it gives now."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
CONVOLUTIONS = {"convolution", "convolution_backward"}
ATTENTION = {
    f"_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "flash_attention_backward",
        "flash_attention_for_cpu",
        "flash_attention_for_cpu_backward",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
    )
}


def zeros(right: Tensor, before: Tensor | None) -> Tensor:
    return torch.zeros_like(right)


def wrong_tail(right: Tensor, before: Tensor | None) -> Tensor:
    """The last column is never written: other columns are where it should be."""
    changed = right.clone()
    changed[..., -1] = changed[..., 0].clone() * 2 + 1
    return changed


def tail_of_zeros(right: Tensor, before: Tensor | None) -> Tensor:
    changed = right.clone()
    changed[..., -2:] = 0
    return changed


def one_bit(right: Tensor, before: Tensor | None) -> Tensor:
    """The sign of one number, the largest."""
    changed = right.clone().contiguous()
    flat = changed.view(-1)
    place = flat.abs().argmax()
    flat[place] = -flat[place]
    return changed


def one_nan(right: Tensor, before: Tensor | None) -> Tensor:
    changed = right.clone().contiguous()
    changed.view(-1)[changed.numel() // 2] = float("nan")
    return changed


def stale(right: Tensor, before: Tensor | None) -> Tensor:
    """The kernel does not run: its memory has the previous answer, or its initial value."""
    return torch.full_like(right, float("nan")) if before is None else before.clone()


FAULTS: tuple[Fault, ...] = (zeros, wrong_tail, tail_of_zeros, one_bit, one_nan, stale)


class Broken(TorchDispatchMode):
    """Within it, the named kernels of torch have the fault, forward and backward, except in float64."""

    def __init__(self, kernels: Collection[str], fault: Fault) -> None:
        super().__init__()
        self.kernels, self.fault = kernels, fault
        self.hits = 0
        self._before: dict[tuple[Any, ...], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        return tree_map(self._damaged, given) if func.overloadpacket.__name__ in self.kernels else given

    def _damaged(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype is torch.float64:
            return value
        if not value.numel():  # arguments that a kernel lacks: no bias, no dropout
            return value
        self.hits += 1
        key = (tuple(value.shape), value.dtype)
        changed = self.fault(value, self._before.get(key))
        self._before[key] = value.clone()
        return changed
