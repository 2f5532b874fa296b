"""LyCORIS' LoKr: each weight's change is a Kronecker product, ``scale * kron(w1, w2)``, of two small matrices.

Each factor is one matrix or a product of two. The layers are PEFT's, but apply the product factor by factor: the
full-size change of a weight is never materialised. As in LyCORIS (``lycoris/modules/lokr.py``), the scale is
alpha / rank, or 1 if neither factor is a low-rank product. ``w2`` (or its second part) starts at zero.

Dimensions: a weight [l * k, m * n, ...] has w1 [l, m] and w2 [k, n, ...]; R is the rank.
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
"""Upper bound of the decomposition factors tried for a file; LyCORIS' own presets go up to 64."""


class LokrEntry(FactorEntry):
    """One module's ``scale * kron(w1, w2)``: float32 on the CPU.

    w1: ([l, m],) or ([l, R], [R, m]).
    w2: ([k, n, ...],) or ([k, R], [R, n * ...]), where ... is the kernel of a convolution.
    """

    title, names = "LoKr", NAMES

    @property
    def rank(self) -> int | None:
        """Rank of w2, which divides a file's alpha; the rank of w1 if only w1 is a product, None if neither is."""
        return next((len(factor[1]) for factor in (self.w2, self.w1) if len(factor) == 2), None)

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """(l, k, m, n)."""
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
        """Return the file's tensors.

        A file's alpha counts only if a factor is a product; otherwise a scale other than 1 is folded into w1.
        """
        folded = self.rank is None and self.scale != 1.0
        w1 = (self.w1[0] * self.scale,) if folded else self.w1
        found = {name: tensor.to(dtype) for name, tensor in NAMES.named(w1, self.w2).items()}
        if file_format in ("kohya", "folded"):
            found["alpha"] = torch.tensor(self.scale * self.rank if self.rank else 1.0, dtype=torch.float32)
        return found

    def rows(self, first: int, count: int) -> LokrEntry:
        """Cut whole blocks of rows, which are rows of w1."""
        if (first, count) == (0, self.shape[0]):
            return self
        height = self.shape[0] // len(self.w1[0])
        if first % height or count % height:
            raise ValueError("a LoKr of several modules at once can only be cut between its blocks")
        part = slice(first // height, (first + count) // height)
        return replace(self, w1=(self.w1[0][part], *self.w1[1:]), shape=(count, *self.shape[1:]))


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LokrEntry:
    """Return one module's entry. PEFT's scale is alpha / rank of its config; in other files whole factors ignore alpha.

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
    """Return (w1, w2) of a layer, with products multiplied out."""
    w1, w2 = NAMES.split(LokrAdapter.trained(layer, PEFT_NAME))
    return product(w1), product(w2)


class LokrLinear(LycorisLayer, Linear):
    """PEFT's linear layer, which applies each factor separately; PEFT's own forward builds the full weight change."""

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        w1_LM, w2_KN = _weights(self)
        x_MN = self.input_dropout(x).unflatten(-1, (w1_LM.shape[1], w2_KN.shape[1]))
        mixed = F.linear(x_MN.transpose(-1, -2), w1_LM).transpose(-1, -2)  # [..., l, n]
        return F.linear(mixed, w2_KN).flatten(-2)


class LokrConv2d(LycorisLayer, Conv2d):
    """The same for a convolution: w1 mixes groups of channels, then one small convolution by w2 serves all groups."""

    def change(self, x: Tensor, output: Tensor, base: Any) -> Tensor:
        w1_LM, w2 = _weights(self)
        outer, inner = w1_LM.shape
        w2_KNHW = w2.reshape(len(w2), -1, *base.kernel_size)
        batch, channels, height, width = x.shape
        mixed = w1_LM @ self.input_dropout(x).reshape(batch, inner, -1)  # [B, l, n * H * W]
        mixed = mixed.reshape(batch * outer, channels // inner, height, width)
        return F.conv2d(mixed, w2_KNHW, None, base.stride, base.padding, base.dilation).reshape(output.shape)


class _LokrModel(LoKrModel):
    """PEFT's ``LoKrModel``, with the layer classes above."""

    layers_mapping = {nn.Linear: LokrLinear, nn.Conv2d: LokrConv2d}


class LokrAdapter(FactorAdapter):
    """The LoKr layers of a model. Roles: lokr_w1 or lokr_w1_a and lokr_w1_b, and likewise for lokr_w2."""

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
        """Count trained numbers by the rule of PEFT and LyCORIS: a factor is a product if that is clearly smaller."""
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
        """Draw all tensors from a Kaiming uniform distribution, except the last tensor of w2, which is zero."""
        *others, last = self.trained(layer, PEFT_NAME).values()
        for tensor in others:
            drawn = torch.empty(tensor.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=rng)
            tensor.copy_(drawn)
        last.zero_()

    def fill(self, layer: Any, entry: LokrEntry) -> None:
        """Copy the entry; the layer's scale may differ from the file's, and its rank may be higher."""
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
                "The file does not fit the recipe: no single factor cuts all its layers.",
                where=f"lora.init_from: {path}",
                fix="Start without it. lora-rocm sample can use the file unchanged.",
            )
        if any(_cut(entry.shape, lora.factor) != entry.sides for entry in entries.values()):
            found.append((f"its layers are cut by the factor {factor}", f"lora.factor to {factor}"))
        needed = {name: max(entry.rank or 0, _rank_of_whole(entry)) for name, entry in entries.items()}
        found += self.lacking_ranks(lora, needed)
        highest = max(needed.values(), default=0)
        if lora.decompose_both and any(
            len(entry.w1) == 1 and max(lora.rank, highest) < max(entry.sides[0], entry.sides[2]) / 2
            for entry in entries.values()
        ):
            found.append(("its first factors are whole", "lora.decompose_both to false"))
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
        """Return a factor that reproduces the cuts of all layers."""
        entries = (
            self.entry_of(layer, PEFT_NAME, self.trained(layer, PEFT_NAME)) for _, _, layer in self.modules.values()
        )
        factor = _factor_of(entry.sides for entry in entries)
        assert factor is not None, "one factor has cut them"
        return factor


def _rank_of_whole(entry: LokrEntry) -> int:
    """The least rank at which a layer has a whole second factor, like the entry; 0 if the entry's is a product."""
    return -(-max(entry.sides[1], entry.sides[3]) // 2) if len(entry.w2) == 1 else 0


def _cut(shape: Sequence[int], factor: int) -> tuple[int, int, int, int]:
    """Return (l, k, m, n) of a weight that is cut by a factor."""
    return (*factorization(shape[0], factor), *factorization(shape[1], factor))


def _factor_of(sides: Iterable[tuple[int, int, int, int]]) -> int | None:
    """Return a factor that gives all of these (l, k, m, n); None if there is none.

    Tries the largest cut first, because it is the most likely.
    """
    found = set(sides)
    largest: int = max(max(outer, inner) for outer, _, inner, _ in found)
    candidates: list[int] = [largest, -1, *range(1, FACTORS_TRIED)]
    for factor in candidates:
        if all(_cut((outer * height, inner * width), factor) == (outer, height, inner, width)
               for outer, height, inner, width in found):  # fmt: skip
            return factor
    return None
