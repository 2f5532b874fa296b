"""LyCORIS' LoHa (arXiv 2108.06098): a weight changes by ``scale * (w1 * w2)``, an elementwise product.

``w1`` and ``w2`` are matrix products of rank R, so the change has a rank of up to R * R. The layers are PEFT's. They
compute the change in each forward pass, and recompute it in the backward pass. As in LyCORIS
(``lycoris/modules/loha.py``), a convolution's kernel counts as inputs, the scale is alpha / rank, and ``w2_a`` starts
at zero.

Dimensions: for a weight [O, I, ...], w1_a and w2_a are [O, R], and w1_b and w2_b are [R, I * ...].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoHaConfig, LoHaModel
from peft.tuners.loha.layer import Conv2d, HadaWeight, Linear, LoHaLayer
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.entry import ARITHMETIC, FileKind, FileModule, Form, norm_of, other_shape, product_of, rounded
from lora_rocm.adapters.kinds.lycoris import FactorAdapter, FactorEntry, FactorNames, LycorisLayer, product
from lora_rocm.kernels.made_again import made, made_again
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_parts import kind_named
from lora_rocm.recipe.adapter_sections import AdapterSection

NAMES = FactorNames("hada")
SPREAD = {"hada_w1_a": 0.1, "hada_w1_b": 1.0, "hada_w2_a": 0.0, "hada_w2_b": 1.0}
"""Standard deviation of each tensor's initial values, as in LyCORIS."""


class LohaEntry(FactorEntry):
    """One module's change ``scale * (w1 * w2)``: float32 on the CPU.

    w1, w2: pairs of factors ([O, R], [R, I * ...]), where ... is the kernel of a convolution.
    """

    title, names = "LoHa", NAMES

    @property
    def rank(self) -> int:
        return len(self.w1[1])

    def update(self) -> Tensor:
        change: Tensor = (self.scale * product(self.w1) * product(self.w2)).reshape(self.shape)
        return change

    def norm(self) -> float:
        return norm_of(self.update())

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """Return an error bound: each product's error, multiplied by the largest element of the other product."""
        found = []
        for factor in (self.w1, self.w2):
            size, off = product_of(*(rounded(tensor, dtype) for tensor in factor))
            found.append((float(product(factor).abs().max()), off + ARITHMETIC * size))
        (one, off_one), (two, off_two) = found
        return abs(self.scale) * (one * off_two + two * off_one + off_one * off_two)

    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        found = {name: tensor.to(dtype) for name, tensor in self.named().items()}
        if file_format in ("kohya", "folded"):
            found["alpha"] = torch.tensor(self.scale * self.rank, dtype=torch.float32)
        return found

    def rows(self, first: int, count: int) -> LohaEntry:
        part = slice(first, first + count)
        w1, w2 = ((factor[0][part], factor[1]) for factor in (self.w1, self.w2))
        return replace(self, w1=w1, w2=w2, shape=(count, *self.shape[1:]))


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LohaEntry:
    """Build the entry of one module. Without an alpha the scale is 1.

    Raises:
        ValueError: the tensors are not two matrix products of the same rank.
        AdapterError: the tensors do not fit this layer.
    """
    w1, w2 = ((a, b.flatten(1)) for a, b in NAMES.of_file(module))
    sides = [(len(a), b.shape[1]) for a, b in (w1, w2)]
    if sides[0] != (shape[0], math.prod(shape[1:])):
        raise other_shape(name, sides[0], shape, path)
    scale = 1.0 if module.alpha is None else module.alpha / (module.config_rank or len(w1[1]))
    return LohaEntry(w1, w2, scale, shape)


LOHA = FileKind(kind_named("LoHa"), _entry)


def _change(tensors: Sequence[Tensor]) -> Tensor:
    """Return the change of a weight, of shape [O, I * ...]. Only its four tensors are saved for the backward pass."""
    change: Tensor = HadaWeight.apply(*tensors)
    return change


class LohaLinear(LycorisLayer, Linear):
    """PEFT's linear LoHa layer, but the weight's change is not stored between forward and backward pass."""

    def create_adapter_parameters(self, adapter_name: str, r: int, shape: tuple[int, ...]) -> None:
        """Create PEFT's parameters for the weight's dense shape, because ``shape`` may be a packed weight's shape."""
        layer: Any = self
        Linear.create_adapter_parameters(self, adapter_name, r, dense_shape(layer.get_base_layer()))

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        x = self.input_dropout(x)
        change_OI, again = made(_change, list(LohaAdapter.trained(self, PEFT_NAME).values()))
        with made_again((change_OI, again)):
            return F.linear(x, change_OI)


class LohaConv2d(LycorisLayer, Conv2d):
    """PEFT's LoHa layer for convolutions, but the weight's change is not stored between forward and backward pass."""

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        x = self.input_dropout(x)
        change, again = made(_change, list(LohaAdapter.trained(self, PEFT_NAME).values()))
        with made_again((change, again)):
            return F.conv2d(x, change.view(base.weight.shape), None, base.stride, base.padding, base.dilation)


class _LohaModel(LoHaModel):
    """PEFT's LoHa model, with the layer classes of this module."""

    layers_mapping = {nn.Linear: LohaLinear, nn.Conv2d: LohaConv2d}


class LohaAdapter(FactorAdapter):
    """The LoHa layers of a model. Roles of the tensors: hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b."""

    algorithm = "loha"
    layer_type = LoHaLayer
    tuner = _LohaModel
    files = LOHA
    config_type = LoHaConfig

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        return 2 * lora.rank * (shape[0] + math.prod(shape[1:]))

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> LohaEntry:
        shape = dense_shape(layer.get_base_layer())
        return LohaEntry(*NAMES.split(tensors), float(layer.scaling[name]), shape)

    @staticmethod
    def update_norms(modules: Sequence[Mapping[str, Tensor]]) -> Tensor:
        norms = []
        for tensors in modules:  # one by one: a product takes as much memory as a weight
            w1, w2 = NAMES.split({role: tensor.float() for role, tensor in tensors.items()})
            norms.append(torch.linalg.vector_norm(product(w1) * product(w2)))
        return torch.stack(norms)

    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Draw w1_a, w1_b and w2_b from normal distributions, and set w2_a to zero."""
        for role, tensor in self.trained(layer, PEFT_NAME).items():
            tensor.copy_(torch.randn(tensor.shape, generator=rng) * SPREAD[role])

    def fill(self, layer: Any, entry: LohaEntry) -> None:
        """Copy the entry's effect. The layer may have a different scale than the file, and a higher rank."""
        ours = NAMES.split(self.trained(layer, PEFT_NAME))
        for mine, theirs in zip(ours, (entry.w1, entry.w2), strict=True):
            mine[0].zero_()[:, : entry.rank].copy_(theirs[0])
            mine[1][: entry.rank].copy_(theirs[1])
        ours[1][0].mul_(entry.scale / layer.scaling[PEFT_NAME])

    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
        return self.lacking_ranks(lora, {name: entry.rank for name, entry in entries.items()})
