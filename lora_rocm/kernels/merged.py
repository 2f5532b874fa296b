"""One matrix product for several frozen linear layers with the same input, including their LoRA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lora_rocm.kernels.base_product import BaseProduct, UnpackedProduct
from lora_rocm.kernels.fused_lora import lora_projections
from lora_rocm.kernels.lora_layer import LoraLinear, base_of, plain_lora
from lora_rocm.kernels.weight_format import PackedLinear, is_packed, product_of


class MergedLinears:
    """Computes several layers with the same input by one matrix product.

    The layers' weights become views of one tensor, and their biases views of another. Packed weights, and weights that
    offloading has moved since, are concatenated in each pass instead. If any layer is not a plain LoRA layer, the
    layers are called one by one.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        bases = [base_of(layer) for layer in layers]
        self.weight_OI: Tensor | None = None
        self.bias_O: Tensor | None = None
        if not is_packed(bases[0]):
            self.weight_OI = _joined([base.get_parameter("weight") for base in bases])
            has_bias = bases[0].bias is not None
            self.bias_O = _joined([base.get_parameter("bias") for base in bases]) if has_bias else None

    @classmethod
    def of(cls, *layers: nn.Module) -> MergedLinears | None:
        """Return the merged layers, or None if they cannot be merged.

        All layers must be adapted, all dense or all packed, and all with or all without bias.
        """
        bases = [base_of(layer) for layer in layers if isinstance(layer, LoraLinear)]
        alike = len(bases) == len(layers) and {type(base) for base in bases} in ({nn.Linear}, {PackedLinear})
        return cls(layers) if alike and len({base.bias is None for base in bases}) == 1 else None

    def __call__(self, layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the layers. ``layers`` must be the layers that were passed to the constructor."""
        found = [plain_lora(layer, x) for layer in layers]
        if None in found or len({plain[2] for plain in found if plain}) != 1:
            return tuple(layer(x) for layer in layers)
        bases = [base_of(layer) for layer in layers]
        if not torch.compiler.is_compiling() and not self._holds(bases[0]):
            self.weight_OI = self.bias_O = None
        a_RI, b_OR, scales = zip(*found, strict=True)
        bias_O = self.bias_O
        if bias_O is None and bases[0].bias is not None:
            bias_O = torch.cat([base.get_parameter("bias") for base in bases]).to(x.dtype)
        product = _product(bases, x.dtype) if self.weight_OI is None else None
        return lora_projections(x, self.weight_OI, a_RI, b_OR, scales[0], bias_O, product)

    def _holds(self, base: nn.Module) -> bool:
        return self.weight_OI is None or self.weight_OI.data_ptr() == base.get_parameter("weight").data_ptr()


def _product(bases: Sequence[nn.Module], dtype: torch.dtype) -> BaseProduct:
    """Return the product with the layers' weights, which are packed or no longer views of one tensor."""
    packed = [base for base in bases if isinstance(base, PackedLinear)]
    if packed:
        return product_of(packed, dtype)
    return UnpackedProduct(lambda: torch.cat([base.get_parameter("weight") for base in bases]))


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return joined
