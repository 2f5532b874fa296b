"""The product with a frozen weight, forward and backward, as the layers with a LoRA ask for it.

A dense weight is a tensor of the caller. Any other weight is behind a ``BaseProduct``: it is unpacked for each pass
(``UnpackedProduct``), or its codes are multiplied as they are stored (``eight_bit.EightBitProduct``).

Dimensions: M rows (all leading dimensions), I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

Outputs = tuple[Sequence[Tensor], Tensor | None]
"""The outputs [..., O] of each layer, and a dense weight that the backward pass needs again, or None."""


class BaseProduct(Protocol):
    """The product with the frozen weights of one layer, or of several layers with the same input."""

    def outputs(self, x: Tensor, bias_O: Tensor | None, rows: Sequence[int], needed: bool) -> Outputs:
        """Return x W^T + b for each layer, in the dtype of ``x``.

        Args:
            x: input [..., I].
            bias_O: biases of all layers, concatenated, or None.
            rows: number of outputs of each layer.
            needed: whether the gradient of ``x`` will be needed.
        """

    def input_gradient(self, dy: Sequence[Tensor], kept_OI: Tensor | None) -> Tensor:
        """Return the sum of dy W over the layers, a new tensor [..., I].

        Args:
            dy: gradient of each layer's output [..., O].
            kept_OI: the weight that ``outputs`` returned.
        """


@dataclass(frozen=True)
class UnpackedProduct:
    """The product with a dense weight that is made for each pass.

    dense: returns the weights of all layers, concatenated by rows, in the dtype of the input.
    """

    dense: Callable[[], Tensor]

    def outputs(self, x: Tensor, bias_O: Tensor | None, rows: Sequence[int], needed: bool) -> Outputs:
        weight_OI = self.dense()
        return _split(F.linear(x, weight_OI, bias_O), rows), weight_OI if needed and unpacks_once() else None

    def input_gradient(self, dy: Sequence[Tensor], kept_OI: Tensor | None) -> Tensor:
        return _dense_gradient(dy, self.dense() if kept_OI is None else kept_OI)


def base_outputs(
    x: Tensor,
    weight_OI: Tensor | None,
    bias_O: Tensor | None,
    product: BaseProduct | None,
    rows: Sequence[int],
    needed: bool,
) -> Outputs:
    """Return the base outputs by a dense weight, or by ``product`` if there is none; see ``BaseProduct.outputs``."""
    if weight_OI is not None:
        return _split(F.linear(x, weight_OI, bias_O), rows), weight_OI
    assert product is not None
    return product.outputs(x, bias_O, rows, needed)


def base_gradient(dy: Sequence[Tensor], kept_OI: Tensor | None, product: BaseProduct | None) -> Tensor:
    """Return the gradient of the input, with the weight or None that ``base_outputs`` returned."""
    if product is not None:
        return product.input_gradient(dy, kept_OI)
    assert kept_OI is not None
    return _dense_gradient(dy, kept_OI)


def _split(y: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    return [y] if len(rows) == 1 else y.split(list(rows), dim=-1)


def _dense_gradient(dy: Sequence[Tensor], weight_OI: Tensor) -> Tensor:
    weights = weight_OI.split([part.shape[-1] for part in dy])
    dx: Tensor = dy[0] @ weights[0]
    for part, weight in zip(dy[1:], weights[1:], strict=True):
        dx.addmm_(part, weight)
    return dx


_unpacks_once: ContextVar[bool] = ContextVar("unpacks_once", default=False)


def unpacks_once() -> bool:
    """Whether products save the dense weight that they made, for their backward pass (``unpacked_once``)."""
    return _unpacks_once.get()


@contextmanager
def unpacked_once() -> Iterator[None]:
    """Return a context for the forward pass of a recomputed block, and for its recomputation.

    A dense weight that is made in the recomputation is kept until the layer's backward pass, which would otherwise make
    it again. Weights saved in the forward pass are discarded by the recomputation.
    """
    token = _unpacks_once.set(True)
    try:
        yield
    finally:
        _unpacks_once.reset(token)
