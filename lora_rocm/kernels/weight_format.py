"""How the weight of a frozen layer is stored, and how it becomes the dense weight that a product needs.

A format keeps what it stores in parameters and buffers of the layer. Transfer, fingerprints, offloading and the
footprint go through those, whatever their number format is, and so need to know nothing of it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class WeightFormat(Protocol):
    """One way to store frozen weights.

    name: for people, for example "int8".
    """

    @property
    def name(self) -> str: ...

    def pack(self, component: nn.Module) -> None:
        """Store the frozen layers of a component in this format, in place; on the meta device too.

        The names of modules stay; the tensors of a packed layer may be others. Trained layers are left alone.
        """
        ...

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Bytes of a component's parameters once it is packed; ``component`` is not, and may have no memory.

        Args:
            component: dense.
            dtype: of everything that the format leaves dense.
        """
        ...

    def dense(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight of one packed layer in the layout of the dense layer ([O, I] or [O, I, kh, kw])."""
        ...


class DenseFormat:
    """Weights as they are, in bfloat16, float16 or float32."""

    name = "dense"

    def pack(self, component: nn.Module) -> None:
        """Nothing to do."""

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Of each parameter its numbers."""
        return sum(parameter.numel() for parameter in component.parameters()) * dtype.itemsize

    def dense(self, layer: nn.Module, dtype: torch.dtype) -> Tensor:
        """The weight itself if it has this number format already."""
        weight: Any = layer.weight
        found: Tensor = weight.to(dtype)
        return found


DENSE = DenseFormat()


def format_of(layer: nn.Module) -> WeightFormat:
    """The format that a layer's weight is stored in."""
    return layer.weight_format if isinstance(layer, PackedLinear) else DENSE


def dense_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's weight as plain numbers, whatever it is stored in."""
    return format_of(layer).dense(layer, dtype)


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer's weight is stored in another format than dense numbers."""
    return format_of(layer) is not DENSE


class PackedLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in a format. Between passes nothing of it is dense.

    Args:
        layer: the dense layer, whose bias is taken over.
        weight_format: whose ``dense`` reads ``weight`` and ``buffers``.
        weight: what is stored, first dimension the outputs.
        buffers: what else is stored, by name.
    """

    weight_format: WeightFormat

    def __init__(self, layer: nn.Linear, weight_format: WeightFormat, weight: Tensor, **buffers: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_format = weight_format
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = layer.bias
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """As the dense layer's, in the number format of ``input``."""
        output: Tensor = _PackedProduct.apply(input, self)
        return output


class _PackedProduct(torch.autograd.Function):
    """Keeps neither the input nor a dense weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return torch.nn.functional.linear(x, dense_weight(layer, x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        return dy @ dense_weight(ctx.layer, dy.dtype), None
