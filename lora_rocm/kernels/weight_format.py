"""Storage formats of frozen weights, and the conversion to the dense weight that a matrix product needs.

A format stores its tensors as parameters and buffers of the layer. Transfer, fingerprints, offloading and the memory
estimate work on these tensors in any dtype, so they need not know the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.kernels.backend import Implementation, note_shared
from lora_rocm.kernels.base_product import BaseProduct, UnpackedProduct


class WeightFormat(Protocol):
    """A storage format of frozen weights.

    name: display name, for example "int8".
    """

    @property
    def name(self) -> str: ...

    def chosen(self, component: nn.Module) -> Mapping[str, nn.Linear]:
        """Return the layers of a dense component that this format stores, by their paths."""

    def packed(self, layer: nn.Linear) -> PackedLinear:
        """Return a layer with the weight of ``layer`` in this format. Its bytes depend only on the dense values."""

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Bytes of a component's parameters after packing.

        Args:
            component: a component that is not packed yet; it may be on the meta device.
            dtype: dtype of all weights that stay dense.
        """

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        """Write the dense weight of a packed layer to ``out_OI``, which is contiguous, rounded to its dtype."""

    def product(self, layers: Sequence[PackedLinear], dtype: torch.dtype) -> BaseProduct:
        """Return the product with packed layers of this format that have the same input, which has this dtype."""

    def unpacks(self, layer: PackedLinear) -> bool:
        """Whether ``product`` makes the dense weight of a layer for a large input."""


class DenseFormat:
    """Unpacked weights in bfloat16, float16 or float32."""

    name = "dense"

    def chosen(self, component: nn.Module) -> Mapping[str, nn.Linear]:
        """Return no layers."""
        return {}

    def packed(self, layer: nn.Linear) -> PackedLinear:
        """Raise ValueError, because this format packs no layer."""
        raise ValueError(f"the dense format cannot pack {layer}")

    def unpack(self, layer: PackedLinear, implementation: Implementation, out_OI: Tensor) -> None:
        """Raise ValueError, because no packed layer has this format."""
        raise ValueError(f"the dense format cannot unpack {layer}")

    def product(self, layers: Sequence[PackedLinear], dtype: torch.dtype) -> BaseProduct:
        """Raise ValueError, because no packed layer has this format."""
        raise ValueError(f"the dense format cannot multiply {layers}")

    def unpacks(self, layer: PackedLinear) -> bool:
        """Raise ValueError, because no packed layer has this format."""
        raise ValueError(f"the dense format cannot multiply {layer}")

    def num_bytes(self, component: nn.Module, dtype: torch.dtype) -> int:
        """Bytes of all parameters in ``dtype``, except for integers, which keep their own dtype."""
        return sum(
            parameter.numel() * (dtype if parameter.is_floating_point() else parameter.dtype).itemsize
            for parameter in component.parameters()
        )


DENSE = DenseFormat()


def dense_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a layer's weight as a dense tensor, for any storage format. A dense weight of this dtype is not copied."""
    if isinstance(layer, PackedLinear):
        return layer.dense(dtype, "eager")
    weight: Any = layer.weight
    found: Tensor = weight.to(dtype)
    return found


def dense_shape(layer: nn.Module) -> tuple[int, ...]:
    """Return the shape of a layer's dense weight, for any storage format."""
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    weight: Any = layer.weight
    return tuple(weight.shape)


def pack(component: nn.Module, weight_format: WeightFormat) -> None:
    """Replace the frozen layers that a format supports by packed ones, in place; also on the meta device.

    The paths of modules do not change, but a packed layer may have other tensors. Trained layers are unchanged.
    """
    for path, layer in weight_format.chosen(component).items():
        if not layer.weight.requires_grad:
            component.set_submodule(path, weight_format.packed(layer))


def is_packed(layer: nn.Module) -> bool:
    """Whether a layer's weight is stored in a packed format."""
    return isinstance(layer, PackedLinear)


class PackedLinear(nn.Linear):
    """A frozen linear layer with a packed weight. Between passes no dense weight exists.

    Args:
        layer: the dense layer; the packed layer uses its bias.
        weight_format: the format, which unpacks ``weight`` and ``buffers``.
        weight: packed tensor; its first dimension is the outputs. Its bytes are kept as int8, because PEFT would cast
            its adapter, and T5 its activations, to any other dtype.
        buffers: further packed tensors, by name.

    Attributes:
        implementation: implementation of the kernel that computes the dense weight.
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
        """Return the dense weight [O, I], in a new tensor or in ``out_OI``.

        ``implementation``: overrides the layer's own if it is not None.
        """
        if out_OI is None:
            out_OI = note_shared(self.weight.new_empty(dense_shape(self), dtype=dtype))
        self.weight_format.unpack(self, implementation or self.implementation, out_OI)
        return out_OI

    def forward(self, input: Tensor) -> Tensor:
        """Return the output that the dense layer would give, in the dtype of ``input``."""
        output: Tensor = _PackedProduct.apply(input, self)
        return output


class _PackedProduct(torch.autograd.Function):
    """A matrix product that keeps neither its input nor a dense weight for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.product = product_of([layer], x.dtype)
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        (y,), kept_OI = ctx.product.outputs(x, bias, [layer.out_features], ctx.needs_input_grad[0])
        ctx.save_for_backward(kept_OI)
        output: Tensor = y
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (kept_OI,) = ctx.saved_tensors
        return ctx.product.input_gradient([dy], kept_OI), None


def product_of(layers: Sequence[PackedLinear], dtype: torch.dtype) -> BaseProduct:
    """Return the product with the weights of packed layers that have the same input, which has this dtype."""
    return layers[0].weight_format.product(layers, dtype)


def unpacked_product(layers: Sequence[PackedLinear], dtype: torch.dtype) -> UnpackedProduct:
    """Return a product that makes the dense weights of packed layers in each pass."""
    return UnpackedProduct(partial(joined, layers, dtype, _unpack))


def joined(
    layers: Sequence[PackedLinear], dtype: torch.dtype, write: Callable[[PackedLinear, Tensor], object]
) -> Tensor:
    """Return numbers of packed layers with the same inputs, concatenated by rows.

    ``write``: writes the numbers of a layer to a tensor [O, I] of this dtype.
    """
    rows = [layer.out_features for layer in layers]
    joined_OI = note_shared(layers[0].weight.new_empty(sum(rows), layers[0].in_features, dtype=dtype))
    for layer, part_OI in zip(layers, joined_OI.split(rows), strict=True):
        write(layer, part_OI)
    return joined_OI


def _unpack(layer: PackedLinear, out_OI: Tensor) -> None:
    layer.dense(out_OI.dtype, None, out_OI)


def use_implementation(component: nn.Module, implementation: Implementation) -> None:
    """Set the implementation with which the packed layers of a component compute their dense weights."""
    for layer in component.modules():
        if isinstance(layer, PackedLinear):
            layer.implementation = implementation
