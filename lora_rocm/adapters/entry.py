"""What the trained tensors of one module mean, as values, and how a kind of adapter stands in files."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.errors import AdapterError

Say = Callable[[str], None]
Form = str
"""Of a file: kohya, diffusers or peft (``output.formats``)."""

ROUNDING = {
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
}
"""Unit roundoff and half of the smallest number, of the formats that files are written in."""
ARITHMETIC = 1e-5
"""Of a product's size: float32 products of different code, summed in another order."""
CANCELLATION = 1e-6
"""Of a weight's size: float32 noise of subtracting a base weight from a patched one."""


class Entry(ABC):
    """What one module's trained tensors do: float32 tensors on the CPU.

    The base weight is ``W``, [out, in] or [out, in, kh, kw]; its change is called the effect.
    """

    scale: float

    @property
    @abstractmethod
    def rank(self) -> int | None:
        """The rank of its low-rank factors; None without any."""

    @property
    def needs_weight(self) -> bool:
        """Whether the effect depends on the base weight."""
        return False

    @abstractmethod
    def update(self) -> Tensor:
        """What is added to the base weight, in its shape."""

    def effect(self, weight: Tensor) -> Tensor:
        """The change of a base weight (float32) as a whole: the reference that files are compared with."""
        return self.update()

    @abstractmethod
    def norm(self) -> float:
        """The norm of ``update``."""

    def additive(self) -> Entry:
        """This entry without what depends on the base weight."""
        return self

    def difference(self, other: Entry) -> Tensor:
        """``other.update() - self.update()``; any shape with the same norm.

        Raises:
            ValueError: their shapes differ.
        """
        ours, theirs = self.update(), other.update()
        if ours.shape != theirs.shape:
            raise ValueError(f"{list(theirs.shape)} instead of {list(ours.shape)}")
        return theirs - ours

    @abstractmethod
    def allowance(self, dtype: torch.dtype, weight: Tensor | None = None) -> float:
        """The largest norm of a difference that rounding the tensors to ``dtype`` explains, to first order.

        With ``weight`` the difference is one of effects, else of updates.
        """

    @abstractmethod
    def scaled(self, factor: float) -> Entry:
        """The same with ``factor`` times the update."""

    @abstractmethod
    def tensors(self, form: Form, dtype: torch.dtype) -> dict[str, Tensor]:
        """Ending of a name in a file -> tensor; factors in ``dtype``, what is few and delicate in float32."""

    @abstractmethod
    def rows(self, first: int, count: int) -> Entry:
        """The entry of ``count`` rows of the weight, from ``first`` on.

        Raises:
            AdapterError: the rows have no entry of this kind.
        """

    @abstractmethod
    def joined(self, parts: Sequence[tuple[int, Entry]], rows: int) -> Entry:
        """The entry of a weight of so many rows of which each part has those from its first on; the rest do not change.

        ``self`` is the first part. One part that is the whole comes back as it is.

        Raises:
            AdapterError: there is no such entry of this kind.
        """


@dataclass
class FileModule:
    """What a file says of one module.

    key: its name there. parts: role -> tensor. config_rank: of a PEFT config, if the alpha is of that.
    """

    key: str
    parts: dict[str, Tensor]
    alpha: float | None
    use_rslora: bool = False
    config_rank: float | None = None


@dataclass(frozen=True)
class FileKind:
    """How one kind of adapter stands in files.

    Attributes:
        name: as people call it ("LoRA").
        peft_type: as PEFT's configs call it.
        roles: ending of a tensor's name -> role of the tensor.
        factors: roles of what is written in the file's number format.
        lacking: roles that a module has -> what it lacks to be whole, in words.
        entry: (module name, module, shape of its weight, file) -> entry; ValueError or AdapterError if it is none.
        check_config: refuses a PEFT config that asks for more; AdapterError.
        config_alpha: the name of the alpha in a PEFT config.
        config_decides_rank: PEFT divides the alpha by the config's rank, whatever the tensors' shapes are.
        text_endings: PEFT's ending of a tensor's name -> the one by which transformers finds it in a text encoder.
    """

    name: str
    peft_type: str
    roles: Mapping[str, str]
    factors: frozenset[str]
    lacking: Callable[[Collection[str]], Sequence[str]]
    entry: Callable[[str, FileModule, tuple[int, ...], Path], Entry]
    check_config: Callable[[Mapping[str, Any], Path], None]
    config_alpha: str = "lora_alpha"
    config_decides_rank: bool = False
    text_endings: Mapping[str, str] = field(default_factory=dict)

    def role_of(self, tensor: str) -> tuple[str, str] | None:
        """(module, role) of a tensor's name; None where it is no part of this kind."""
        ending = next((ending for ending in self.roles if tensor.endswith("." + ending)), None)
        return None if ending is None else (tensor.removesuffix("." + ending), self.roles[ending])


def file_error(code: str, what: str, path: Path, fix: str = "") -> AdapterError:
    """An error about an adapter's file."""
    return AdapterError(code, what, where=str(path), fix=fix)


def other_shape(name: str, found: tuple[int, int], shape: tuple[int, ...], path: Path) -> AdapterError:
    """The error for a module of a file whose weight is another one than the model's.

    Args:
        name: of the module.
        found: (outputs, inputs) that the file's tensors make.
        shape: of the model's weight.
        path: of the file.
    """
    inputs = int(torch.Size(shape[1:]).numel())
    return file_error(
        "lora-of-another-model",
        f"In this LoRA {name} changes a {found[0]} x {found[1]} weight; in this model it is {shape[0]} x {inputs}.",
        path,
        "Use a LoRA that was made for this model's family.",
    )


def norm_of(tensor: Tensor) -> float:
    """The Frobenius norm."""
    return float(torch.linalg.vector_norm(tensor))


Rounded = tuple[float, float]
"""(norm, how far rounding may move it), both from above."""


def rounded(tensor: Tensor, dtype: torch.dtype) -> Rounded:
    """A tensor that is written in a format."""
    (unit, smallest), size = ROUNDING[dtype], norm_of(tensor)
    return size, unit * size + smallest * math.sqrt(tensor.numel())


def product_of(one: Rounded, other: Rounded) -> Rounded:
    """The product of two tensors, or their Kronecker product."""
    return one[0] * other[0], one[0] * other[1] + other[0] * one[1] + one[1] * other[1]
