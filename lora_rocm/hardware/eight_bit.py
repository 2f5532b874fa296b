"""The GPU targets that multiply 8-bit numbers faster than 16-bit numbers (``eight_bit.toml``)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_rocm.errors import MachineError
from lora_rocm.foundation.tables import read_table
from lora_rocm.hardware.facts import Gpu

Product = Literal["fp8", "int8"]
OF_NVIDIA: dict[Product, tuple[int, int]] = {"fp8": (8, 9), "int8": (8, 0)}
"""Least compute capability of an NVIDIA GPU (torch aten/src/ATen/native/cuda/ScaledBlas.cpp; CUDA's guide)."""
NVIDIA, OTHER = "nvidia", "other"
"""Names for targets in ``ProductRate.on``."""
HIPBLASLT_OFF = "they need hipBLASLt, which this start does not use: it has the profile safe"
"""A reason for ``refused``."""


@dataclass(frozen=True)
class Target:
    """Rows of ``eight_bit.toml``, which describes the fields at its top."""

    gfx: tuple[str, ...]
    why: str
    source: str
    products: tuple[Product, ...] = ()
    fp8: Literal["ocp", "fnuz"] | None = None


@dataclass(frozen=True)
class ProductRate:
    """The rate of products in a format, as a multiple of the rate of 16-bit products.

    Rows of ``eight_bit.toml``, which describes the fields at its top.
    """

    on: tuple[str, ...]
    product: Product
    times: float
    source: str
    measured_on: str | None = None

    def text(self, gpu_name: str | None) -> str:
        """Return a sentence about this rate for a GPU with this name, or for a GPU that is not known."""
        counted = f"products in {self.product} are counted at {self.times:g} times the rate of 16 bit"
        if gpu_name is not None and self.measured_on == gpu_name:
            return f"{counted}, by measured steps on an {self.measured_on}"
        return f"{counted}. This is estimated, and was not measured on this GPU: {self.source}"


@dataclass(frozen=True)
class EightBitTable:
    """Contents of ``eight_bit.toml``."""

    target: tuple[Target, ...]
    rate: tuple[ProductRate, ...]


_TABLE = read_table(Path(__file__).with_suffix(".toml"), EightBitTable)
TARGETS = {gfx: target for target in _TABLE.target for gfx in target.gfx}
RATES = {(name, rate.product): rate for rate in _TABLE.rate for name in rate.on}


def refusal_of(gfx: str | None, product: str) -> str | None:
    """Return the reason, as a clause, why an AMD GPU is not used for a product; None if it is."""
    target = TARGETS.get(gfx or "")
    if target is None:
        return f"it is not known whether {gfx or 'this GPU'} multiplies {product} correctly and faster than 16 bit"
    return None if product in target.products else f"{gfx}: {target.why}"


def rate_of(target: str | None, compute: str) -> ProductRate:
    """Return the rate of a recipe's products.

    Args:
        target: gfx target of an AMD GPU, ``NVIDIA``, or None if the GPU is not known.
        compute: ``model.compute``. For products in 16 bits the result is not used.
    """
    product: Product = "int8" if compute == "int8" else "fp8"
    return RATES.get((target or OTHER, product)) or RATES[OTHER, product]


def target_of(gpu: Gpu | None) -> str | None:
    """Return the name of a GPU's target for ``rate_of``."""
    return None if gpu is None else gpu.gfx if gpu.vendor == "amd" else NVIDIA


def has_fnuz(gfx: str | None) -> bool:
    """Whether a GPU's fp8 is e4m3fnuz."""
    target = TARGETS.get(gfx or "")
    return target is not None and target.fp8 == "fnuz"


def refused(product: str, why: str) -> MachineError:
    """Return the error for a machine that is not used for products in a format. ``why``: the reason, as a clause."""
    return MachineError(
        "eight-bit-refused",
        f"Products in {product} cannot be used here: {why}.",
        where=f"model.compute: {product}",
        fix=f"Remove model.compute: the base stays stored in {product}, and is multiplied in the run's precision.",
    )
