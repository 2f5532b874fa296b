"""LyCORIS' LoKr: a weight changes by ``scale * kron(w1, w2)``, the Kronecker product of two small matrices.

Each factor is one matrix or a product of two. The layers are PEFT's, but they apply one factor after the other and
never build the full-size change. As in LyCORIS (``lycoris/modules/lokr.py``), the scale is alpha / rank, or 1 if
neither factor is a product. ``w2``, or its second matrix, starts at zero.

Dimensions: for a weight [l * k, m * n, ...], w1 is [l, m] and w2 is [k, n, ...]. R is the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoKrConfig, LoKrModel, PeftConfig
from peft.tuners.lokr.layer import Conv2d, Linear, LoKrLayer, factorization
from torch import Tensor, nn

from lora_rocm.adapters.adapter_kind import PEFT_NAME
from lora_rocm.adapters.entry import ARITHMETIC, FileKind, FileModule, Form, norm_of, other_shape, product_of, rounded
from lora_rocm.adapters.kinds.lycoris import FactorAdapter, FactorEntry, FactorNames, LycorisLayer, product
from lora_rocm.errors import AdapterError
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.model_files.adapter_parts import kind_named
from lora_rocm.model_files.readers import is_cut_above_root
from lora_rocm.recipe.adapter_sections import AdapterSection, LokrSection

NAMES = FactorNames("lokr", whole=True)
FACTORS_TRIED = 1024
"""Largest decomposition factor that is tried when reading a file. LyCORIS' own presets go up to 64."""


class LokrEntry(FactorEntry):
    """One module's change ``scale * kron(w1, w2)``: float32 on the CPU.

    w1: one matrix ([l, m],), or a product of two ([l, R], [R, m]).
    w2: ([k, n, ...],) or ([k, R], [R, n * ...]), where ... is the kernel of a convolution.
    """

    title, names = "LoKr", NAMES

    @property
    def rank(self) -> int | None:
        """Rank by which a file's alpha is divided: the rank of w2, else of w1; None if neither factor is a product."""
        return next((len(factor[1]) for factor in (self.w2, self.w1) if len(factor) == 2), None)

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """Numbers (l, k, m, n) that split the weight's sides into l * k outputs and m * n inputs."""
        outer, inner = len(self.w1[0]), self.w1[-1].shape[1]
        return outer, self.shape[0] // outer, inner, self.shape[1] // inner

    def update(self) -> Tensor:
        change = torch.kron(product(self.w1), product(self.w2).flatten(1)).reshape(self.shape)
        return change * self.scale

    def norm(self) -> float:
        return abs(self.scale) * norm_of(product(self.w1)) * norm_of(product(self.w2))

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        size, off = reduce(product_of, (rounded(tensor, dtype) for tensor in (*self.w1, *self.w2)))
        return abs(self.scale) * (off + ARITHMETIC * size)

    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by name suffix.

        Readers ignore alpha if neither factor is a product. In this case a scale other than 1 is multiplied into w1.
        """
        folded = self.rank is None and self.scale != 1.0
        w1 = (self.w1[0] * self.scale,) if folded else self.w1
        found = {name: tensor.to(dtype) for name, tensor in NAMES.named(w1, self.w2).items()}
        if file_format in ("kohya", "folded"):
            found["alpha"] = torch.tensor(self.scale * self.rank if self.rank else 1.0, dtype=torch.float32)
        return found

    def rows(self, first: int, count: int) -> LokrEntry:
        """Return the entry for some rows of the weight. They must be whole blocks (one per row of w1)."""
        if (first, count) == (0, self.shape[0]):
            return self
        height = self.shape[0] // len(self.w1[0])
        if first % height or count % height:
            raise ValueError("a LoKr of a fused weight can be split into modules only between blocks")
        part = slice(first // height, (first + count) // height)
        return replace(self, w1=(self.w1[0][part], *self.w1[1:]), shape=(count, *self.shape[1:]))


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LokrEntry:
    """Build the entry of one module.

    In PEFT's files the scale is alpha / rank, as in the config. In other files alpha is ignored if neither factor is a
    product.

    Raises:
        ValueError: the tensors cannot be a Kronecker product.
        AdapterError: the tensors do not fit this layer.
    """
    w1, w2 = NAMES.of_file(module)
    (outer, inner), (height, width) = (
        (len(factor[0]), math.prod(factor[-1].shape[1:])) for factor in (w1, w2)
    )  # the kernel of a convolution counts as inputs of w2
    kernel = shape[2:]
    other_kernel = w2[0].ndim > 2 and tuple(w2[0].shape[2:]) != kernel
    if outer * height != shape[0] or inner * width != math.prod(shape[1:]) or width % math.prod(kernel) or other_kernel:
        raise other_shape(name, (outer * height, inner * width), shape, path)
    if len(w2) == 1:
        w2 = (w2[0].reshape(height, width // math.prod(kernel), *kernel),)
    entry = LokrEntry(w1, w2, 1.0, shape)
    rank = module.config_rank or entry.rank
    scale = 1.0 if module.alpha is None or rank is None else module.alpha / rank
    return replace(entry, scale=scale)


LOKR = FileKind(kind_named("LoKr"), _entry)


def _weights(layer: Any) -> tuple[Tensor, Tensor]:
    """Return w1 and w2 of a layer as one matrix each."""
    w1, w2 = NAMES.split(LokrAdapter.trained(layer, PEFT_NAME))
    return product(w1), product(w2)


class LokrLinear(LycorisLayer, Linear):
    """PEFT's linear LoKr layer, but it applies the factors one after the other instead of building the full change."""

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        w1_LM, w2_KN = _weights(self)
        x_MN = self.input_dropout(x).unflatten(-1, (w1_LM.shape[1], w2_KN.shape[1]))
        mixed = F.linear(x_MN.transpose(-1, -2), w1_LM).transpose(-1, -2)  # [..., l, n]
        return F.linear(mixed, w2_KN).flatten(-2)


class LokrConv2d(LycorisLayer, Conv2d):
    """PEFT's LoKr layer for convolutions, but it applies the factors one after the other.

    w1 mixes groups of channels; a small convolution with w2 is then applied to every group.
    """

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        w1_LM, w2 = _weights(self)
        outer, inner = w1_LM.shape
        w2_KNHW = w2.reshape(len(w2), -1, *base.kernel_size)
        batch, channels, height, width = x.shape
        mixed = w1_LM @ self.input_dropout(x).reshape(batch, inner, -1)  # [B, l, n * H * W]
        mixed = mixed.reshape(batch * outer, channels // inner, height, width)
        return F.conv2d(mixed, w2_KNHW, None, base.stride, base.padding, base.dilation).reshape(output.shape)


class _LokrModel(LoKrModel):
    """PEFT's LoKr model, with the layer classes of this module."""

    layers_mapping = {nn.Linear: LokrLinear, nn.Conv2d: LokrConv2d}


class LokrAdapter(FactorAdapter):
    """The LoKr layers of a model. Roles of the tensors: lokr_w1, or lokr_w1_a and lokr_w1_b; likewise for lokr_w2."""

    algorithm = "lokr"
    layer_type = LoKrLayer
    tuner = _LokrModel
    files = LOKR
    config_type = LoKrConfig

    @classmethod
    def options(cls, lora: LokrSection) -> dict[str, Any]:
        return {"decompose_both": lora.decompose_both, "decompose_factor": lora.factor}

    @classmethod
    def insert_layers(cls, component: nn.Module, config: PeftConfig) -> None:
        super().insert_layers(component, config)
        for layer in component.modules():
            if isinstance(layer, LoKrLayer) and cls.trained(layer, PEFT_NAME).keys() <= set(
                NAMES.factors
            ):  # no product
                layer.alpha[PEFT_NAME], layer.scaling[PEFT_NAME] = layer.r[PEFT_NAME], 1.0

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        """Return the number of trained parameters. As in PEFT and LyCORIS, a factor is a product only at a low rank."""
        assert isinstance(lora, LokrSection), "a section of this kind"
        (outer, height), (inner, width) = (factorization(side, lora.factor) for side in shape[:2])
        kernel, rank = math.prod(shape[2:]), lora.rank
        first = rank * (outer + inner) if lora.decompose_both and rank < max(outer, inner) / 2 else outer * inner
        second = rank * (height + width * kernel) if rank < max(height, width) / 2 else height * width * kernel
        total: int = first + second
        return total

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> LokrEntry:
        shape = dense_shape(layer.get_base_layer())
        return LokrEntry(*NAMES.split(tensors), float(layer.scaling[name]), shape)

    @staticmethod
    def update_norms(modules: Sequence[Mapping[str, Tensor]]) -> Tensor:
        stacks = NAMES.split({role: torch.stack([each[role] for each in modules]).float() for role in modules[0]})
        first_n, second_n = (torch.linalg.vector_norm(product(stack).flatten(1), dim=1) for stack in stacks)
        norms_n: Tensor = first_n * second_n
        return norms_n

    def start(self, name: str, layer: Any, lora: AdapterSection, rng: torch.Generator) -> None:
        """Draw all tensors from a Kaiming uniform distribution, except the last matrix of w2, which is set to zero."""
        *others, last = self.trained(layer, PEFT_NAME).values()
        for tensor in others:
            drawn = torch.empty(tensor.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=rng)
            tensor.copy_(drawn)
        last.zero_()

    def fill(self, layer: Any, entry: LokrEntry) -> None:
        """Copy the entry's effect. The layer may have a different scale than the file, and a higher rank."""
        ours = NAMES.split(self.trained(layer, PEFT_NAME))
        for mine, theirs in zip(ours, (entry.w1, entry.w2), strict=True):
            if len(mine) == 1:
                mine[0].copy_(product(theirs).reshape(mine[0].shape))
            else:
                rank = len(theirs[1])
                mine[0][:, :rank].copy_(theirs[0])
                mine[1].zero_()[:rank].copy_(theirs[1])
        ours[1][-1].mul_(entry.scale / layer.scaling[PEFT_NAME])

    def unfit(self, lora: AdapterSection, entries: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
        assert isinstance(lora, LokrSection), "a section of this kind"
        found: list[tuple[str, str]] = []
        factor = _factor_of(entry.sides for entry in entries.values())
        if factor is None:
            raise AdapterError(
                "init-from-unfit",
                "The file does not fit the recipe: no single value of lora.factor matches all its layers.",
                where=f"lora.init_from: {path}",
                fix="Remove lora.init_from. lora-rocm sample can use the file unchanged.",
            )
        if any(_cut(entry.shape, lora.factor) != entry.sides for entry in entries.values()):
            found.append((f"its layers were built with the factor {factor}", f"lora.factor to {factor}"))
        needed = {name: max(entry.rank or 0, _rank_of_whole(entry)) for name, entry in entries.items()}
        found += self.lacking_ranks(lora, needed)
        highest = max(needed.values(), default=0)
        if lora.decompose_both and any(
            len(entry.w1) == 1 and max(lora.rank, highest) < max(entry.sides[0], entry.sides[2]) / 2
            for entry in entries.values()
        ):
            found.append(("its first factors are single matrices, not products", "lora.decompose_both to false"))
        return found

    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        both = any("lokr_w1_a" in self.trained(layer, PEFT_NAME) for layer in layers)
        return {**super().config_fields(layers), "decompose_both": both, "decompose_factor": self._factor()}

    def arguments(self) -> dict[str, str]:
        return {"factor": str(self._factor())}

    def reader_notice(self) -> str:
        shapes = {
            f"{number}.{role}": tensor.shape
            for number, (_, _, layer) in enumerate(self.modules.values())
            for role, tensor in self.trained(layer, PEFT_NAME).items()
        }
        if not is_cut_above_root(shapes):
            return ""
        return (
            "lora.factor is above the square root of a side of a layer: LyCORIS refuses such a LoKr file. Other "
            "programs read it. With a smaller lora.factor, or -1, LyCORIS reads the file, too."
        )

    def _factor(self) -> int:
        """Return a decomposition factor that splits the weights of all layers as they are split now."""
        entries = (
            self.entry_of(layer, PEFT_NAME, self.trained(layer, PEFT_NAME)) for _, _, layer in self.modules.values()
        )
        factor = _factor_of(entry.sides for entry in entries)
        assert factor is not None, "one factor has cut them"
        return factor


def _rank_of_whole(entry: LokrEntry) -> int:
    """Return the lowest rank at which the layer stores w2 as one matrix, if the entry's w2 is one matrix.

    Return 0 if the entry's w2 is a product.
    """
    return -(-max(entry.sides[1], entry.sides[3]) // 2) if len(entry.w2) == 1 else 0


def _cut(shape: Sequence[int], factor: int) -> tuple[int, int, int, int]:
    """Return (l, k, m, n), the split of a weight of this shape by a decomposition factor."""
    return (*factorization(shape[0], factor), *factorization(shape[1], factor))


def _factor_of(sides: Iterable[tuple[int, int, int, int]]) -> int | None:
    """Return a decomposition factor that results in all of these (l, k, m, n), or None if there is none.

    The largest split is tried first, because it is the most likely factor.
    """
    found = set(sides)
    largest: int = max(max(outer, inner) for outer, _, inner, _ in found)
    candidates: list[int] = [largest, -1, *range(1, FACTORS_TRIED)]
    for factor in candidates:
        if all(_cut((outer * height, inner * width), factor) == (outer, height, inner, width)
               for outer, height, inner, width in found):  # fmt: skip
            return factor
    return None
