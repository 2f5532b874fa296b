"""Storage formats of frozen weights, and their conversion to the dense weight that a product needs.

A format keeps its tensors in parameters and buffers of the layer. Transfer, fingerprints, offloading and the footprint
work on these tensors in any dtype, so they need not know the format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.kernels.backend import Implementation


class WeightFormat(Protocol):
    """A storage format of frozen weights.

    name: for people, for example "int8".
    """

    @property
    def name(self) -> str: ...

    def chosen(self, component: nn.Module) -> Mapping[str, nn.Linear]:
        """The layers that this format stores, by their paths in a dense component."""

    def packed(self, layer: nn.Linear) -> PackedLinear:
        """A chosen layer with its weight in this format. The bytes depend on the dense values only."""

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Bytes of a component's parameters after packing.

        Args:
            component: dense, not packed; it may have no memory.
            dtype: dtype of everything that the format leaves dense.
        """

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        """Write the weight of a packed layer, rounded to the dtype of ``out_OI``, which is contiguous."""


class DenseFormat:
    """Unpacked weights in bfloat16, float16 or float32."""

    name = "dense"

    def chosen(self, component: nn.Module) -> Mapping[str, nn.Linear]:
        """No layer."""
        return {}

    def packed(self, layer: nn.Linear) -> PackedLinear:
        """Refuse: no layer is chosen."""
        raise ValueError(f"{layer} stays dense")

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        """Refuse: no packed layer has this format."""
        raise ValueError(f"{layer} is not dense")

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Bytes of all parameters in ``dtype``; whole numbers keep theirs."""
        return sum(
            parameter.numel() * (dtype if parameter.is_floating_point() else parameter.dtype).itemsize
            for parameter in component.parameters()
        )


DENSE = DenseFormat()


def dense_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """A layer's dense weight, whatever its storage format; not copied if it is stored dense in this dtype."""
    if isinstance(layer, PackedLinear):
        return layer.dense(dtype, "eager")
    weight: Any = layer.weight
    found: Tensor = weight.to(dtype)
    return found


def dense_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of a layer's dense weight, whatever its storage format."""
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    weight: Any = layer.weight
    return tuple(weight.shape)


def pack(component: nn.Module, weight_format: WeightFormat) -> None:
    """Store the chosen frozen layers of a component in a format, in place, also on the meta device.

    Paths of modules stay; the tensors of a packed layer may differ. Trained layers are unchanged.
    """
    for path, layer in weight_format.chosen(component).items():
        if not layer.weight.requires_grad:
            component.set_submodule(path, weight_format.packed(layer))


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer's weight is stored in another format than the dense one."""
    return isinstance(layer, PackedLinear)


class PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight. Between passes no dense weight exists.

    Args:
        layer: the dense layer; its bias is taken over.
        weight_format: its ``unpack`` reads ``weight`` and ``buffers``.
        weight: the packed tensor; its first dimension is the outputs. Its bytes are kept as int8, because
            PEFT would cast its adapter, and T5 its activations, to any other dtype.
        buffers: further packed tensors, by name.

    Attributes:
        implementation: backend of the kernel that computes the dense weight for a product.
    """

    weight_format: WeightFormat
    implementation: Implementation = "eager"

    def __init__(self, layer: nn.Linear, weight_format: WeightFormat, weight: Tensor, **buffers: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight_format = weight_format
        self.weight = nn.Parameter(weight.view(torch.int8), requires_grad=False)
        self.bias = layer.bias
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.train(layer.training)

    def dense(
        self, dtype: torch.dtype, implementation: Implementation | None = None, out_OI: Tensor | None = None
    ) -> Tensor:
        """The dense weight [O, I], in a new tensor or in ``out_OI``; ``implementation`` replaces the layer's own."""
        if out_OI is None:
            out_OI = self.weight.new_empty(dense_shape(self), dtype=dtype)
        self.weight_format.unpack(self, implementation or self.implementation, out_OI)
        return out_OI

    def forward(self, input: Tensor) -> Tensor:
        """The dense layer's output, in the dtype of ``input``."""
        output: Tensor = _PackedProduct.apply(input, self)
        return output


class _PackedProduct(torch.autograd.Function):
    """A product that keeps neither its input nor a dense weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return torch.nn.functional.linear(x, layer.dense(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        return dy @ ctx.layer.dense(dy.dtype), None


def joined_weights(layers: Sequence[PackedLinear], dtype: torch.dtype) -> Tensor:
    """The dense weights of packed layers with equally many inputs, concatenated by rows: [sum of O, I]."""
    rows = [layer.out_features for layer in layers]
    weight_OI = layers[0].weight.new_empty(sum(rows), layers[0].in_features, dtype=dtype)
    for layer, part_OI in zip(layers, weight_OI.split(rows), strict=True):
        layer.dense(dtype, out_OI=part_OI)
    return weight_OI


def use_implementation(component: nn.Module, implementation: Implementation) -> None:
    """Set the backend with which the packed layers of a component compute their dense weights."""
    for layer in component.modules():
        if isinstance(layer, PackedLinear):
            layer.implementation = implementation
