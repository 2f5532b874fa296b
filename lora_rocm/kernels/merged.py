"""One product for several frozen linear layers of the same input, their LoRA included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lora_rocm.kernels.fused_lora import lora_projections
from lora_rocm.kernels.lora_layer import LoraLinear, base_of, plain_lora
from lora_rocm.kernels.weight_format import PackedLinear, is_packed, joined_weights


class MergedLinears:
    """Computes layers of the same input by one product.

    The weights of the layers become views of one tensor, as do their biases; packed weights are unpacked into one
    tensor in each pass. If a layer is not a plain LoRA, or the first weight was replaced since, the layers are called
    one by one.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        bases = [base_of(layer) for layer in layers]
        packed = is_packed(bases[0])
        self.weight_OI = None if packed else _joined([base.get_parameter("weight") for base in bases])
        has_bias = bases[0].bias is not None
        self.bias_O = _joined([base.get_parameter("bias") for base in bases]) if has_bias else None

    @classmethod
    def of(cls, *layers: nn.Module) -> MergedLinears | None:
        """The layers merged, or None if that cannot help: all have to be adapted and alike in bias and storage."""
        bases = [base_of(layer) for layer in layers if isinstance(layer, LoraLinear)]
        alike = len(bases) == len(layers) and {type(base) for base in bases} in ({nn.Linear}, {PackedLinear})
        return cls(layers) if alike and len({base.bias is None for base in bases}) == 1 else None

    def __call__(self, layers: Sequence[nn.Module], x: Tensor, join: bool = False) -> tuple[Tensor, ...]:
        """The outputs of the layers, which must be those of the constructor; ``join``: see ``lora_projections``."""
        found = [plain_lora(layer, x) for layer in layers]
        merged = None not in found and len({plain[2] for plain in found if plain}) == 1
        if not merged or not (torch.compiler.is_compiling() or self._holds(layers[0])):
            return tuple(layer(x) for layer in layers)
        a_RI, b_OR, scales = zip(*found, strict=True)
        packed = [base for layer in layers if isinstance(base := base_of(layer), PackedLinear)]
        dense = partial(joined_weights, packed, x.dtype) if packed else None
        bias_O = None if self.bias_O is None else self.bias_O.to(x.dtype)
        return lora_projections(x, self.weight_OI, a_RI, b_OR, scales[0], join, bias_O, dense)

    def _holds(self, layer: nn.Module) -> bool:
        return self.weight_OI is None or self.weight_OI.data_ptr() == base_of(layer).get_parameter("weight").data_ptr()


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = rows
    return joined
