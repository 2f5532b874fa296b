"""The library that computes matrix products on an AMD GPU: rocBLAS (torch calls it cublas) or hipBLASLt (cublaslt).

The parent plans torch's variables. Before torch 2.12 a 0 in them was read as unset, and unset means hipBLASLt on RDNA 4
(pytorch#174377). So each heavy process also sets torch's preference, by ``obey``, and reads it back in the self-test.

``torch._int_mm`` and ``torch._scaled_mm`` always go to hipBLASLt, whatever the preference is (FlyDSL#1073). No module
calls them, and tests/test_architecture.py (``OF_BLAS``) refuses one that does: a product of 8-bit numbers would bring
hipBLASLt into the profile safe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

VARIABLES = ("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")
"""Two names of one switch; a 1 in either wins over a 0 in the other (torch ATen/Context.h)."""


def hipblaslt_is_off(environ: Mapping[str, str]) -> bool:
    """Whether the variables switch hipBLASLt off, read as torch 2.12 and newer read them."""
    values = [environ.get(name) for name in VARIABLES]
    return "0" in values and "1" not in values


def obey(environ: Mapping[str, str]) -> None:
    """Prefer rocBLAS in this process if the variables request it, however this torch version reads them."""
    if hipblaslt_is_off(environ):
        torch.backends.cuda.preferred_blas_library("cublas")


def preferred() -> str:
    """The preferred library that torch names now: "cublas", "cublaslt", "ck" or "default"."""
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
