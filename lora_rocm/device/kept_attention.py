"""Keeps the outputs of attention in a recomputed block, so that its recomputation does not compute attention again.

The backward pass of attention reads its output and the statistics of its softmax. Kept, they take about as much memory
as the block's input, and save its most expensive operation. Queries, keys and values are recomputed. The same tensors
are used as without recomputation, so no bit of a gradient changes.

``scaled_dot_product_attention`` chooses one of torch's attention operators. Only while it runs, a dispatch mode watches
its operators, so all other operations of the block are as fast as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

OPERATORS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""torch's operators that compute attention without keeping all scores. Plain attention is none of them."""
CALLS: tuple[Callable[..., object], ...] = (F.scaled_dot_product_attention,)
KEEPABLE = ("auto", "sdpa-flash", "sdpa-ck", "sdpa-efficient", "sdpa-cudnn", "math-groups", "math-groups-float32")
"""Settings of attention (``device.attention``) that allow its output to be kept."""


class AttentionStore:
    """The outputs of one block's attention calls, in order. Each is given back once."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def keeping(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass, in which outputs are kept."""
        return _within(self, self._keep)

    def giving(self) -> AbstractContextManager[object]:
        """Return the context of the recomputation, in which the kept outputs take the place of attention."""
        return _within(self, self._give)

    def _keep(self, compute: Callable[[], object]) -> object:
        result = compute()
        self._kept.append(tree_map_only(Tensor, Tensor.detach, result))  # autograd marks the result itself
        return result

    def _give(self, compute: Callable[[], object]) -> object:
        return self._kept.pop(0)


Keywords = dict[str, object] | None
Attention = Callable[[Callable[[], object]], object]
_current: ContextVar[Attention | None] = ContextVar("attention", default=None)


def attention_output(compute: Callable[[], Tensor]) -> Tensor:
    """Return what ``compute`` returns, kept or given back if a context of ``AttentionStore`` is active.

    It is for attention outside of torch's operators. Call it where gradients are not recorded.
    """
    through = _current.get()
    result = compute() if through is None else through(compute)
    assert isinstance(result, Tensor)
    return result


@contextmanager
def _within(store: AttentionStore, through: Attention) -> Iterator[None]:
    token = _current.set(through)
    try:
        with _Calls(through):
            yield
    finally:
        _current.reset(token)


class _Calls(TorchFunctionMode):
    """Watches the operators of each attention call. All other calls are unchanged."""

    def __init__(self, through: Attention) -> None:
        super().__init__()
        self._through = through

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Keywords = None
    ) -> object:
        if func not in CALLS:
            return func(*args, **(kwargs or {}))
        with _Operators(self._through):
            return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, through: Attention) -> None:
        super().__init__()
        self._through = through

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Keywords = None
    ) -> object:
        if func not in OPERATORS:
            return func(*args, **(kwargs or {}))
        return self._through(lambda: func(*args, **(kwargs or {})))
