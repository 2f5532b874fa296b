"""Tensors that the backward pass makes again instead of keeping them.

Used where a tensor costs one cheap kernel and its inputs are kept anyway. In blocks that are recomputed the hooks of
``torch.utils.checkpoint`` decide what is kept, and these do nothing.
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
"""A tensor, and a function that makes it again with the same bits. The function must not hold its autograd graph."""


def made(make: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor]) -> Made:
    """What ``make`` makes of the inputs, and how it is made again."""
    return make(inputs), partial(make, [tensor.detach() for tensor in inputs])


class _Recipe(NamedTuple):
    make: Callable[[], Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Hooks:
    """Hooks within others: made tensors become recipes, and the others get what is left."""

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
    """A context in which operations keep no tensor of these, or view of one. They have to live until its end."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return nullcontext()
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (_same, _same)
    if getattr(pack, "__module__", "") == checkpoint.__module__:
        return nullcontext()
    hooks = _Hooks({tensor.untyped_storage()._cdata: make for tensor, make in tensors}, pack, unpack)
    return saved_tensors_hooks(hooks.forget, hooks.remember)


def _same(tensor: Tensor) -> Tensor:
    return tensor
