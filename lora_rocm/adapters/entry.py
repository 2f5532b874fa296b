"""Trained tensors of one module as values, and the file format of each adapter kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lora_rocm.errors import AdapterError
from lora_rocm.model_files.adapter_parts import KindParts
from lora_rocm.model_files.adapter_parts import Notify as Notify

Form = str
"""Format of a module's tensors in a file: one of ``output.formats``, or folded.

"folded" has the names of diffusers and the scale in the factors, for readers that ignore an alpha.
"""

ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}
"""File dtype -> (unit roundoff, half of the smallest number)."""
ARITHMETIC = 1e-5
"""Relative to the size of a product: difference of float32 products with another order of summation."""
CANCELLATION = 1e-6
"""Relative to the size of a weight: float32 noise of subtracting a base weight from a patched one."""


class Entry(ABC):
    """One module's trained tensors as values: float32 on the CPU.

    The base weight is ``W``, [out, in] or [out, in, kh, kw]; its change is called the effect.
    """

    scale: float

    @property
    @abstractmethod
    def rank(self) -> int | None:
        """Rank of the low-rank factors; None if there are none."""

    @property
    def needs_weight(self) -> bool:
        """Whether the effect depends on the base weight."""
        return False

    @abstractmethod
    def update(self) -> Tensor:
        """Return the update that is added to the base weight, in the weight's shape."""

    def effect(self, weight: Tensor) -> Tensor:
        """Return the total change of a base weight (float32): the reference for comparing files."""
        return self.update()

    @abstractmethod
    def norm(self) -> float:
        """Return the norm of ``update``."""

    def additive(self) -> Entry:
        """Return this entry without the parts that depend on the base weight."""
        return self

    def difference(self, other: Entry) -> Tensor:
        """Return ``other.update() - self.update()``, or a tensor of another shape with the same norm.

        Raises:
            ValueError: their shapes differ.
        """
        ours, theirs = self.update(), other.update()
        if ours.shape != theirs.shape:
            raise ValueError(f"{list(theirs.shape)} instead of {list(ours.shape)}")
        return theirs - ours

    @abstractmethod
    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """Return the largest norm of a difference that rounding the tensors to ``dtype`` explains, to first order.

        With ``weight`` the difference is between effects, otherwise between updates.
        """

    def scaled(self, factor: float) -> Self:
        """Return this entry with its update multiplied by ``factor``; a DoRA's magnitudes stay as trained."""
        found = copy(self)
        found.scale = self.scale * factor
        return found

    @abstractmethod
    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return name ending in a file -> tensor.

        Factors are in ``dtype``; small, precision-critical tensors are in float32.
        """

    def folded(self) -> Entry:
        """Return an entry with the same effect that needs no alpha in a file."""
        return self

    @abstractmethod
    def rows(self, first: int, count: int) -> Entry:
        """Return the entry of ``count`` rows of the weight, starting at ``first``.

        Raises:
            AdapterError: no entry of this kind exists for these rows.
        """

    @abstractmethod
    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Entry:
        """Return the entry of a weight with ``rows`` rows, assembled from (first row, entry) pairs.

        Other rows do not change. ``self`` is the first part. A single part that covers the whole weight is returned
        unchanged.

        Raises:
            AdapterError: no such entry of this kind exists.
        """


@dataclass
class FileModule:
    """One module as stored in a file.

    key: its name in the file. parts: role -> tensor.
    config_rank: rank in the PEFT config, if the scale is alpha divided by that rank.
    """

    key: str
    parts: dict[str, Tensor]
    alpha: float | None
    use_rslora: bool = False
    config_rank: float | None = None


@dataclass(frozen=True)
class FileKind:
    """File format of one kind of adapter.

    Attributes:
        parts: its tensors by name, and the allowed values of its PEFT config.
        entry: (module name, module, shape of its weight, file) -> entry; raises ValueError or AdapterError if the
            module is invalid.
        text_endings: PEFT's ending of a tensor's name -> the ending that transformers expects in a text encoder.
    """

    parts: KindParts
    entry: Callable[[str, FileModule, tuple[int, ...], Path], Entry]
    text_endings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its display name ("LoRA")."""
        return self.parts.name


def file_error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    """Return an error about an adapter file."""
    return AdapterError(code, what, where=str(path), fix=fix)


def other_shape(name: str, found: tuple[int, int], shape: tuple[int, ...], path: Path) -> AdapterError:
    """Return the error for a module with another weight shape in the file than in the model.

    Args:
        name: name of the module.
        found: (outputs, inputs) of the file's weight.
        shape: shape of the model's weight.
        path: path of the file.
    """
    inputs = int(torch.Size(shape[1:]).numel())
    return file_error(
        "lora-of-another-model",
        f"In this LoRA {name} changes a {found[0]} x {found[1]} weight, but in this model it is {shape[0]} x {inputs}.",
        path,
        "Use a LoRA that was made for this model's family.",
    )


def norm_of(tensor: Tensor) -> float:
    """Return the Frobenius norm."""
    return float(torch.linalg.vector_norm(tensor))


Rounded = tuple[float, float]
"""(norm, largest error by rounding), both upper bounds."""


def rounded(tensor: Tensor, dtype: torch.dtype) -> Rounded:
    """Return the norm and rounding error of a tensor stored in ``dtype``."""
    (unit, smallest), size = ROUNDING[dtype], norm_of(tensor)
    return size, unit * size + smallest * math.sqrt(tensor.numel())


def product_of(one: Rounded, other: Rounded) -> Rounded:
    """Bound the product, or the Kronecker product, of two tensors."""
    return one[0] * other[0], one[0] * other[1] + other[0] * one[1] + one[1] * other[1]
