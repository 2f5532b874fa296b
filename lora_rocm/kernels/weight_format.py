"""Storage formats of frozen weights, and the conversion to the dense weight that a matrix product needs.

A format stores its tensors as parameters and buffers of the layer. Transfer, fingerprints, offloading and the memory
estimate work on these tensors in any dtype, so they need not know the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_rocm.kernels.backend import Implementation, note_shared


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
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        weight_OI = layer.dense(x.dtype)
        ctx.save_for_backward(weight_OI if unpacks_once() and ctx.needs_input_grad[0] else None)
        return torch.nn.functional.linear(x, weight_OI, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        (weight_OI,) = ctx.saved_tensors
        return dy @ (ctx.layer.dense(dy.dtype) if weight_OI is None else weight_OI), None


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


def joined_weights(layers: Sequence[PackedLinear], dtype: torch.dtype, reserved: int = 0) -> Tensor:
    """Return the dense weights of packed layers, concatenated by rows, then ``reserved`` rows.

    The layers must have the same number of inputs. The reserved rows are not initialised.
    """
    rows = [layer.out_features for layer in layers]
    weight_NI = note_shared(layers[0].weight.new_empty(sum(rows) + reserved, layers[0].in_features, dtype=dtype))
    for layer, part_OI in zip(layers, weight_NI[: sum(rows)].split(rows), strict=True):
        layer.dense(dtype, out_OI=part_OI)
    return weight_NI


def use_implementation(component: nn.Module, implementation: Implementation) -> None:
    """Set the implementation with which the packed layers of a component compute their dense weights."""
    for layer in component.modules():
        if isinstance(layer, PackedLinear):
            layer.implementation = implementation
