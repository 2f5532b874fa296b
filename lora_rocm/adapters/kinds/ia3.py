"""LyCORIS' IA3 (arXiv 2205.05638): one trained number ``w`` per output scales a layer, ``W' = (1 + w) W``.

The bias is unchanged, as in LyCORIS and A1111. PEFT's IA3 scales the bias too, so PEFT's files differ. The numbers
start at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoHaConfig, LoHaModel
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.entry import ARITHMETIC, CANCELLATION, Entry, FileKind, FileModule, Form, norm_of, other_shape
from lora_rocm.adapters.kinds.lycoris import LycorisAdapter, OutputAdapter, OutputEntry, OutputLayer
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_parts import kind_named
from lora_rocm.recipe.adapter_sections import AdapterSection

STRETCH = "ia3_stretch"


@dataclass
class Ia3Entry(OutputEntry):
    """One module's change ``scale * w * W``: float32 on the CPU.

    stretch: ``w``, of shape [out].
    scale: factor of the change (1: as trained).
    shape: shape of the weight.
    """

    stretch: Tensor
    scale: float
    shape: tuple[int, ...]

    def effect(self, weight: Tensor) -> Tensor:
        return weight * (self.scale * self.stretch).view(-1, *[1] * (weight.ndim - 1))

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        if weight is None:
            return 0.0
        return ARITHMETIC * norm_of(self.effect(weight)) + CANCELLATION * norm_of(weight)

    def named(self) -> dict[str, Tensor]:
        """Return the trained tensor, keyed by its name in the layer."""
        return {STRETCH: self.stretch}

    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by name suffix. They are always float32, because they are small."""
        shape = (-1,) if len(self.shape) == 2 else (1, -1, *[1] * len(self.shape[2:]))
        return {"weight": self.stretch.view(shape), "on_input": torch.tensor(0.0)}

    def rows(self, first: int, count: int) -> Ia3Entry:
        part = slice(first, first + count)
        return replace(self, stretch=self.stretch[part], shape=(count, *self.shape[1:]))

    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Ia3Entry:
        """Join the parts of a weight; rows without a part do not change."""
        stretch = self.stretch.new_zeros(rows)
        for first, entry in parts:
            assert isinstance(entry, Ia3Entry), "entries of one kind"
            stretch[first : first + len(entry.stretch)] = entry.stretch * entry.scale
        return Ia3Entry(stretch, 1.0, (rows, *self.shape[1:]))


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> Ia3Entry:
    """Build the entry of one module.

    Raises:
        AdapterError: the tensor does not fit this layer, or it scales the inputs instead of the outputs.
    """
    stretch = module.parts["weight"].float().flatten()
    if len(stretch) != shape[0]:
        raise other_shape(name, (len(stretch), shape[1]), shape, path)
    return Ia3Entry(stretch, 1.0, shape)


IA3 = FileKind(kind_named("IA3"), _entry)


class Ia3Layer(OutputLayer):
    """A layer that scales each output by a trained number."""

    adapter_layer_names = (STRETCH,)

    @classmethod
    def sizes(cls, rows: int, r: int) -> dict[str, tuple[int, ...]]:
        return {STRETCH: (rows,)}

    def changed(self, y: Tensor) -> Tensor:
        return y * LycorisAdapter.trained(self, PEFT_NAME)[STRETCH].to(y.dtype)


class _Ia3Model(LoHaModel):
    """PEFT's LoHa model, but with ``Ia3Layer`` as its layer. LoHa's config has all the fields that IA3 needs."""

    prefix = "ia3_"
    tuner_layer_cls = Ia3Layer
    layers_mapping = {nn.Linear: Ia3Layer, nn.Conv2d: Ia3Layer}


class Ia3Adapter(OutputAdapter):
    """The IA3 layers of a model, with one trained tensor each, in the role "ia3_stretch"."""

    algorithm = "ia3"
    layer_type = Ia3Layer
    tuner = _Ia3Model
    files = IA3

    @classmethod
    def config(cls, lora: AdapterSection, pattern: str) -> LoHaConfig:
        config = cls.smallest(pattern)
        config.input_dropout = lora.dropout
        return config

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        return shape[0]

    @classmethod
    def smaller(cls, lora: AdapterSection) -> Iterator[tuple[str, AdapterSection]]:
        """Yield nothing: IA3 has no setting that trains fewer parameters."""
        yield from ()

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> Ia3Entry:
        return Ia3Entry(tensors[STRETCH], float(layer.scaling[name]), dense_shape(layer.get_base_layer()))

    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
        return []
