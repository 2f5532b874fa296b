"""Makes the backward pass recompute certain tensors instead of keeping them.

It is used for a tensor that costs one cheap kernel and has inputs that are kept anyway. In recomputed blocks it has no
effect: there the hooks of ``torch.utils.checkpoint`` decide which tensors are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Made = tuple[Tensor, Callable[[], Tensor]]
"""A tensor, and a function that recomputes it bit for bit. The function must not reference the tensor's autograd graph.
"""


def made(make: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor]) -> Made:
    """Return ``make(inputs)``, and a function that recomputes it in the backward pass."""
    return make(inputs), partial(make, [tensor.detach() for tensor in inputs])


class _Recipe(NamedTuple):
    make: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Hooks:
    """Saves the tensors in ``recipes`` as functions that recompute them. All other tensors go to the outer hooks."""

    def __init__(
        self,
        recipes: Mapping[int, Callable[[], Tensor]],
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
    ) -> None:
        self.recipes, self.pack, self.unpack = recipes, pack, unpack

    def forget(self, tensor: Tensor) -> Any:
        make = self.recipes.get(tensor.untyped_storage()._cdata)
        if make is None:
            return self.pack(tensor)
        return _Recipe(make, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @torch.no_grad()
    def remember(self, kept: Any) -> Tensor:
        if isinstance(kept, _Recipe):
            return kept.make().as_strided(kept.size, kept.stride, kept.offset)
        return self.unpack(kept)


def made_again(*tensors: Made) -> AbstractContextManager[Any]:
    """Return a context in which operations save neither these tensors nor their views for the backward pass.

    The tensors must exist until the context ends.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_same, _same)
    if getattr(pack, "__module__", "") == checkpoint.__module__:
        return nullcontext()
    hooks = _Hooks({tensor.untyped_storage()._cdata: make for tensor, make in tensors}, pack, unpack)
    return saved_tensors_hooks(hooks.forget, hooks.remember)


def _same(tensor: Tensor) -> Tensor:
    return tensor
