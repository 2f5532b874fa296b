"""The trained tensors of one module as values, and the file format of each adapter kind."""

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
"""Format in which a file stores a module's tensors: one of ``output.formats``, or "folded".

"folded" uses diffusers' names and multiplies the scale into the factors, for programs that ignore alpha.
"""

ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}
"""Maps the dtype of a file to (unit roundoff, half of the smallest positive number)."""
ARITHMETIC = 1e-5
"""Tolerance for float32 products summed in a different order, relative to the size of the product."""
CANCELLATION = 1e-6
"""Tolerance for the float32 error of subtracting a base weight from a patched one, relative to the weight's size."""


class Entry(ABC):
    """The trained tensors of one module as values: float32 on the CPU.

    ``W`` is the base weight, of shape [out, in] or [out, in, kh, kw]. The total change of ``W`` is called the effect.
    """

    scale: float

    @property
    @abstractmethod
    def rank(self) -> int | None:
        """Rank of the low-rank factors, or None if there are none."""

    @property
    def needs_weight(self) -> bool:
        """Whether the effect depends on the base weight."""
        return False

    @abstractmethod
    def update(self) -> Tensor:
        """Return the update that is added to the base weight, in the weight's shape."""

    def effect(self, weight: Tensor) -> Tensor:
        """Return the total change of a float32 base weight. Comparisons of files use this value."""
        return self.update()

    @abstractmethod
    def norm(self) -> float:
        """Return the Frobenius norm of ``update``."""

    def additive(self) -> Entry:
        """Return an entry with only those parts of the change that do not depend on the base weight."""
        return self

    def difference(self, other: Entry) -> Tensor:
        """Return ``other.update() - self.update()``, or a tensor of a different shape with the same norm.

        Raises:
            ValueError: the two updates have different shapes.
        """
        ours, theirs = self.update(), other.update()
        if ours.shape != theirs.shape:
            raise ValueError(f"the updates have different shapes: {list(theirs.shape)} instead of {list(ours.shape)}")
        return theirs - ours

    @abstractmethod
    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """Return the largest difference, as a norm, that rounding the tensors to ``dtype`` can cause (to first order).

        With ``weight`` the bound applies to the difference of two effects, otherwise to the difference of two updates.
        """

    def scaled(self, factor: float) -> Self:
        """Return this entry with its update multiplied by ``factor``. DoRA magnitudes are not scaled."""
        found = copy(self)
        found.scale = self.scale * factor
        return found

    @abstractmethod
    def tensors(self, file_format: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of a file, keyed by the suffix that follows the module's name.

        Factors are in ``dtype``; small tensors that need high precision are in float32.
        """

    def folded(self) -> Entry:
        """Return an entry that has the same effect and can be stored without an alpha."""
        return self

    @abstractmethod
    def rows(self, first: int, count: int) -> Entry:
        """Return the entry for ``count`` rows of the weight, starting at row ``first``.

        Raises:
            ValueError: an entry of this kind cannot be split at these rows.
        """

    @abstractmethod
    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Entry:
        """Return the entry of a weight with ``rows`` rows, assembled from (first row, entry) pairs.

        Rows without a part do not change. ``self`` is the first part. A single part that covers the whole weight is
        returned unchanged.

        Raises:
            ValueError: these parts cannot be combined into one entry of this kind.
        """


@dataclass
class FileModule:
    """One module as stored in a file.

    key: the module's name in the file.
    parts: the module's tensors, keyed by role.
    config_rank: rank in the PEFT config; None if the scale is not computed from it.
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
        parts: names of the kind's tensors, and the allowed values of its PEFT config.
        entry: function that builds an entry from (module name, module, shape of the model's weight, path of the file).
            It raises ValueError or AdapterError if the module is invalid.
        text_endings: maps the ending of a tensor's name in PEFT to the ending that transformers expects in a text
            encoder.
    """

    parts: KindParts
    entry: Callable[[str, FileModule, tuple[int, ...], Path], Entry]
    text_endings: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Display name of the kind, such as "LoRA"."""
        return self.parts.name


def file_error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    """Return an error about an adapter file."""
    return AdapterError(code, what, where=str(path), fix=fix)


def other_shape(name: str, found: tuple[int, int], shape: tuple[int, ...], path: Path) -> AdapterError:
    """Return the error for a module that changes a weight of a different shape than the model's weight.

    Args:
        name: name of the module.
        found: (outputs, inputs) of the weight that the file changes.
        shape: shape of the model's weight.
        path: path of the file.
    """
    inputs = int(torch.Size(shape[1:]).numel())
    return file_error(
        "lora-of-another-model",
        f"The weight of {name} is {found[0]} x {found[1]} in this LoRA, but {shape[0]} x {inputs} in this model.",
        path,
        "Use a LoRA that was made for this model's family.",
    )


def norm_of(tensor: Tensor) -> float:
    """Return the Frobenius norm of a tensor."""
    return float(torch.linalg.vector_norm(tensor))


Rounded = tuple[float, float]
"""Upper bounds of a tensor: (norm, norm of the rounding error)."""


def rounded(tensor: Tensor, dtype: torch.dtype) -> Rounded:
    """Return bounds of the norm and of the rounding error of a tensor stored in ``dtype``."""
    (unit, smallest), size = ROUNDING[dtype], norm_of(tensor)
    return size, unit * size + smallest * math.sqrt(tensor.numel())


def product_of(one: Rounded, other: Rounded) -> Rounded:
    """Return the bounds for the product, or the Kronecker product, of two tensors with these bounds."""
    return one[0] * other[0], one[0] * other[1] + other[0] * one[1] + one[1] * other[1]
