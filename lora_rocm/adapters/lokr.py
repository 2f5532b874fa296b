"""LyCORIS' LoKr: each weight's change is a Kronecker product, ``scale * kron(w1, w2)``, of two small matrices.

Each factor is one matrix or a product of two. The layers are PEFT's, but apply the product factor by factor: the
full-size change of a weight is never materialised, and no random number is drawn. As in LyCORIS
(``lycoris/modules/lokr.py``), the scale is alpha / rank, or 1 if neither factor is a low-rank product; ``w2`` (or its
second part) starts at zero.

Dimensions: a weight [l * k, m * n, ...] has w1 [l, m] and w2 [k, n, ...]; R is the rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoKrConfig, LoKrModel, PeftConfig
from peft.tuners.lokr.layer import Conv2d, Linear, LoKrLayer, factorization
from torch import Tensor, nn

from lora_rocm.adapters.base import PEFT_NAME, Adapter
from lora_rocm.adapters.entry import (
    ARITHMETIC,
    Entry,
    FileKind,
    FileModule,
    Form,
    file_error,
    norm_of,
    other_shape,
    product_of,
    rounded,
)
from lora_rocm.adapters.module_names import adaptable, canonical
from lora_rocm.adapters.targets import either
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.kernels.weight_format import dense_shape
from lora_rocm.recipe.adapter_sections import AdapterSection, LokrSection

FACTORS = ("lokr_w1", "lokr_w2")
PARTS = tuple(f"{factor}{part}" for factor in FACTORS for part in ("", "_a", "_b"))
"""Tensor names in PEFT's layers and in files: a whole factor, or the two matrices of its product."""
FACTORS_TRIED = 1024
"""Upper bound of the decomposition factors tried for a file; LyCORIS' own presets go up to 64."""
Factor = tuple[Tensor, ...]


def _product(factor: Factor) -> Tensor:
    return factor[0] if len(factor) == 1 else factor[0] @ factor[1]


def _factors_of(tensors: Mapping[str, Tensor]) -> tuple[Factor, Factor]:
    """Return (w1, w2) from tensors by ``PARTS``.

    Raises:
        ValueError: a factor is missing, or given both whole and as a product.
    """
    found = []
    for factor in FACTORS:
        whole, parts = factor in tensors, f"{factor}_a" in tensors
        if whole == parts:
            raise ValueError(f"{factor} has to be there whole or as a product, and not both")
        found.append((tensors[factor],) if whole else (tensors[f"{factor}_a"], tensors[f"{factor}_b"]))
    return found[0], found[1]


def _named(w1: Factor, w2: Factor) -> dict[str, Tensor]:
    """Return the tensors by ``PARTS``."""
    return {
        f"{name}{part}": tensor
        for name, factor in zip(FACTORS, (w1, w2), strict=True)
        for part, tensor in zip(("",) if len(factor) == 1 else ("_a", "_b"), factor, strict=True)
    }


@dataclass
class LokrEntry(Entry):
    """One module's ``scale * kron(w1, w2)``: float32 on the CPU.

    w1: ([l, m],) or ([l, R], [R, m]).
    w2: ([k, n, ...],) or ([k, R], [R, n * ...]), where ... is the kernel of a convolution.
    scale: factor of the product.
    shape: shape of the weight.
    """

    w1: Factor
    w2: Factor
    scale: float
    shape: tuple[int, ...]

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
        change = torch.kron(_product(self.w1), _product(self.w2).flatten(1)).reshape(self.shape)
        return change * self.scale

    def norm(self) -> float:
        return abs(self.scale) * norm_of(_product(self.w1)) * norm_of(_product(self.w2))

    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        size, off = reduce(product_of, (rounded(tensor, dtype) for tensor in (*self.w1, *self.w2)))
        return abs(self.scale) * (off + ARITHMETIC * size)

    def scaled(self, factor: float) -> LokrEntry:
        return replace(self, scale=self.scale * factor)

    def tensors(self, form: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the file's tensors.

        A file's alpha counts only if a factor is a product; otherwise a scale other than 1 is folded into w1.
        """
        folded = self.rank is None and self.scale != 1.0
        w1 = (self.w1[0] * self.scale,) if folded else self.w1
        found = {name: tensor.to(dtype) for name, tensor in _named(w1, self.w2).items()}
        if form in ("kohya", "folded"):
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

    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> LokrEntry:
        if len(parts) == 1 and self.shape[0] == rows:
            return self
        raise ValueError("the LoKr of several modules cannot be written as one of a weight that holds them all")


def _lacking(roles: Collection[str]) -> list[str]:
    lacking = []
    for factor in FACTORS:
        halves = [f"{factor}_{half}" for half in "ab"]
        present = [half for half in halves if half in roles]
        if present:
            lacking += [half for half in halves if half not in roles]
        elif factor not in roles:
            lacking.append(factor)
    return lacking


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    others = [name for name in ("modules_to_save", "use_effective_conv2d") if config.get(name)]
    if others:
        what = f"This adapter is more than a LoKr: its config sets {', '.join(others)}."
        raise file_error("lora-kind", what, path, "Use a plain LoKr.")


def _entry(name: str, module: FileModule, shape: tuple[int, ...], path: Path) -> LokrEntry:
    """Return one module's entry. PEFT's scale is alpha / rank of its config; in other files whole factors ignore alpha.

    Raises:
        ValueError: the tensors cannot be a Kronecker product.
        AdapterError: the tensors do not fit this layer.
    """
    w1, w2 = _factors_of({role: tensor.float() for role, tensor in module.parts.items() if role != "alpha"})
    for factor in (w1, w2):
        if factor[0].ndim < 2 or 0 in factor[0].shape or (len(factor) == 2 and factor[0].shape[1] != len(factor[1])):
            raise ValueError(f"{module.key} has factors of the shapes {[tuple(tensor.shape) for tensor in factor]}")
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
    if not math.isfinite(scale):
        raise ValueError(f"{module.key} has the alpha {module.alpha}")
    return replace(entry, scale=scale)


LOKR = FileKind(
    "LoKr",
    "LOKR",
    {part: part for part in PARTS} | {"alpha": "alpha"},
    frozenset(PARTS),
    _lacking,
    _entry,
    _check_config,
    config_alpha="alpha",
    config_decides_rank=True,
)


def _weights(layer: Any) -> tuple[Tensor, Tensor]:
    """Return (w1, w2) of a layer, with products multiplied out."""
    w1, w2 = _factors_of(LokrAdapter.trained(layer, PEFT_NAME))
    return _product(w1), _product(w2)


@dataclass
class _Config(LoKrConfig):
    input_dropout: float = 0.0


class LokrLinear(Linear):
    """PEFT's linear layer, with a forward that applies each factor separately.

    PEFT's own forward builds the full weight change.
    """

    input_dropout = 0.0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return output
        w1_LM, w2_KN = _weights(self)
        x = F.dropout(self._cast_input_dtype(x, w1_LM.dtype), self.input_dropout, self.training)
        x_MN = x.unflatten(-1, (w1_LM.shape[1], w2_KN.shape[1]))
        mixed = F.linear(x_MN.transpose(-1, -2), w1_LM).transpose(-1, -2)  # [..., l, n]
        change = F.linear(mixed, w2_KN).flatten(-2)
        adapted: Tensor = output + (change * self.scaling[PEFT_NAME]).to(output.dtype)
        return adapted


class LokrConv2d(Conv2d):
    """The same for a convolution: w1 mixes groups of channels, then one small convolution by w2 serves all groups."""

    input_dropout = 0.0

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return output
        w1_LM, w2 = _weights(self)
        base, (outer, inner) = self.get_base_layer(), w1_LM.shape
        assert isinstance(base, nn.Conv2d), "what this layer is made for"
        w2_KNHW = w2.reshape(len(w2), -1, *base.kernel_size)
        x_BCHW = F.dropout(self._cast_input_dtype(x, w1_LM.dtype), self.input_dropout, self.training)
        batch, channels, height, width = x_BCHW.shape
        mixed = w1_LM @ x_BCHW.reshape(batch, inner, -1)  # [B, l, n * H * W]
        mixed = mixed.reshape(batch * outer, channels // inner, height, width)
        change = F.conv2d(mixed, w2_KNHW, None, base.stride, base.padding, base.dilation)
        adapted: Tensor = output + (change.reshape(output.shape) * self.scaling[PEFT_NAME]).to(output.dtype)
        return adapted


class _Model(LoKrModel):
    """PEFT's ``LoKrModel``, with the layer classes above."""

    layers_mapping = {nn.Linear: LokrLinear, nn.Conv2d: LokrConv2d}


class LokrAdapter(Adapter):
    """The LoKr layers of a model. Roles: lokr_w1 or lokr_w1_a and lokr_w1_b, and likewise for lokr_w2."""

    layer_type = LoKrLayer
    files = LOKR
    readers = {"kohya": ("comfyui",), "peft": ("peft",)}

    @classmethod
    def config(cls, lora: AdapterSection, pattern: str) -> LoKrConfig:
        assert isinstance(lora, LokrSection), "a section of this kind"
        return _Config(
            r=lora.rank,
            alpha=lora.effective_alpha,  # PEFT divides by the rank; any number works
            decompose_both=lora.decompose_both,
            decompose_factor=lora.factor,
            input_dropout=lora.dropout,
            target_modules=pattern,
        )

    @classmethod
    def put(cls, component: nn.Module, config: PeftConfig) -> None:
        assert isinstance(config, _Config), "a config of this kind"
        _Model(component, config, PEFT_NAME)
        for layer in component.modules():
            if isinstance(layer, LokrLinear | LokrConv2d):
                layer.input_dropout = config.input_dropout
                if not _has_products(layer):
                    layer.alpha[PEFT_NAME], layer.scaling[PEFT_NAME] = layer.r[PEFT_NAME], 1.0

    @classmethod
    def attach(cls, family: ModelFamily, model: LoadedModel, entries: Mapping[str, Any]) -> LokrAdapter:
        for component, root in model.components.items():
            ours = [path for path, _ in adaptable(root) if canonical(component, path) in entries]
            if ours:
                cls.insert(root, _Config(r=1, alpha=1, target_modules=either(ours)))
        layers = cls(family, model).modules
        for name, entry in entries.items():
            layer = layers[name][2]
            for part in PARTS:
                if PEFT_NAME in getattr(layer, part):
                    del getattr(layer, part)[PEFT_NAME]
            for part, tensor in _named(entry.w1, entry.w2).items():
                getattr(layer, part)[PEFT_NAME] = nn.Parameter(tensor, requires_grad=False)
            layer.scaling[PEFT_NAME] = entry.scale
        return cls(family, model)

    @classmethod
    def weights_of(cls, lora: AdapterSection, shape: Sequence[int]) -> int:
        """Count trained numbers by PEFT's rule, which is LyCORIS': a factor is a product if that is clearly smaller."""
        assert isinstance(lora, LokrSection), "a section of this kind"
        (outer, height), (inner, width) = (factorization(side, lora.factor) for side in shape[:2])
        kernel, rank = math.prod(shape[2:]), lora.rank
        first = rank * (outer + inner) if lora.decompose_both and rank < max(outer, inner) / 2 else outer * inner
        second = rank * (height + width * kernel) if rank < max(height, width) / 2 else height * width * kernel
        total: int = first + second
        return total

    @staticmethod
    def trained(layer: Any, name: str) -> dict[str, nn.Parameter]:
        return {part: getattr(layer, part)[name] for part in PARTS if name in getattr(layer, part)}

    @staticmethod
    def entry_of(layer: Any, name: str, tensors: Mapping[str, Tensor]) -> LokrEntry:
        shape = dense_shape(layer.get_base_layer())
        return LokrEntry(*_factors_of(tensors), float(layer.scaling[name]), shape)

    def start(self, layer: Any, rng: torch.Generator) -> None:
        """Draw all tensors from a Kaiming uniform distribution, except the last tensor of w2, which is zero."""
        *others, last = self.trained(layer, PEFT_NAME).values()
        for tensor in others:
            drawn = torch.empty(tensor.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=rng)
            tensor.copy_(drawn)
        last.zero_()

    def fill(self, layer: Any, entry: LokrEntry) -> None:
        """Copy the entry; the layer's scale may differ from the file's, and its rank may be higher."""
        ours = _factors_of(self.trained(layer, PEFT_NAME))
        for mine, theirs in zip(ours, (entry.w1, entry.w2), strict=True):
            if len(mine) == 1:
                mine[0].copy_(_product(theirs).reshape(mine[0].shape))
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
                "The file does not fit the recipe: its layers are not all cut by one factor.",
                where=f"lora.init_from: {path}",
                fix="Start without it. lora-rocm sample draws with the file as it is.",
            )
        if any(_cut(entry.shape, lora.factor) != entry.sides for entry in entries.values()):
            found.append((f"its layers are cut by the factor {factor}", f"lora.factor to {factor}"))
        rank = max((entry.rank or 0 for entry in entries.values()), default=0)
        whole = [max(entry.sides[1], entry.sides[3]) for entry in entries.values() if len(entry.w2) == 1]
        rank = max(rank, *(-(-side // 2) for side in whole if lora.rank < side / 2), 0)
        if rank > lora.rank:
            found.append((f"it has rank {rank}, the recipe asks for rank {lora.rank}", f"lora.rank to {rank}"))
        if lora.decompose_both and any(
            len(entry.w1) == 1 and max(lora.rank, rank) < max(entry.sides[0], entry.sides[2]) / 2
            for entry in entries.values()
        ):
            found.append(("its first factors are whole", "lora.decompose_both to false"))
        return found

    def config_fields(self, layers: Sequence[Any]) -> dict[str, Any]:
        return {
            "decompose_both": any("lokr_w1_a" in self.trained(layer, PEFT_NAME) for layer in layers),
            "decompose_factor": self._factor(),
            "rank_dropout": 0.0,
            "module_dropout": 0.0,
            "use_effective_conv2d": False,
            "init_weights": True,
        }

    def network(self) -> dict[str, str]:
        """Return LyCORIS' own description, for kohya's tools."""
        layers = [layer for _, _, layer in self.modules.values()]
        alpha = next((layer.alpha[PEFT_NAME] for layer in layers if _has_products(layer)), layers[0].r[PEFT_NAME])
        return {
            "ss_network_module": "lycoris.kohya",
            "ss_network_dim": str(layers[0].r[PEFT_NAME]),
            "ss_network_alpha": f"{alpha:g}",
            "ss_network_args": json.dumps({"algo": "lokr", "factor": str(self._factor())}),
        }

    def cannot_read(self, form: Form) -> tuple[str, ...]:
        if form == "peft":
            return ("ComfyUI, Forge, A1111 and kohya's tools (a PEFT folder is for PEFT)",)
        return ("diffusers (reads no LoKr of this model)", "kohya's networks.lora (knows no LoKr; LyCORIS does)")

    def _factor(self) -> int:
        """Return a factor that reproduces the cuts of all layers."""
        entries = (
            self.entry_of(layer, PEFT_NAME, self.trained(layer, PEFT_NAME)) for _, _, layer in self.modules.values()
        )
        factor = _factor_of(entry.sides for entry in entries)
        assert factor is not None, "one factor has cut them"
        return factor


def _has_products(layer: Any) -> bool:
    return bool(LokrAdapter.trained(layer, PEFT_NAME).keys() - set(FACTORS))


def _cut(shape: Sequence[int], factor: int) -> tuple[int, int, int, int]:
    """Return (l, k, m, n) of a weight that is cut by a factor."""
    return (*factorization(shape[0], factor), *factorization(shape[1], factor))


def _factor_of(sides: Iterable[tuple[int, int, int, int]]) -> int | None:
    """Return a factor that gives all of these (l, k, m, n); None if there is none.

    Tries the largest cut first, which is the most likely.
    """
    found = set(sides)
    largest: int = max(max(outer, inner) for outer, _, inner, _ in found)
    candidates: list[int] = [largest, -1, *range(1, FACTORS_TRIED)]
    for factor in candidates:
        if all(_cut((outer * height, inner * width), factor) == (outer, height, inner, width)
               for outer, height, inner, width in found):  # fmt: skip
            return factor
    return None
