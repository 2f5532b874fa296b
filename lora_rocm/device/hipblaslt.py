"""The library that computes matrix products on an AMD GPU: rocBLAS (torch calls it cublas) or hipBLASLt (cublaslt).

The parent process sets torch's environment variables. Before torch 2.12, the value 0 was treated as unset, and unset
means hipBLASLt on RDNA 4 (pytorch#174377), which faults at small LoRA ranks. So each process also sets torch's
preference (``prefer_rocblas_if_off``), and the self-test reads it back. ``rules/amd_rules.toml`` lists
the machines that need it.

``torch._int_mm`` and ``torch._scaled_mm`` always use hipBLASLt, regardless of the preference (FlyDSL#1073). So only
``kernels.eight_bit_library`` calls them, and refuses where hipBLASLt is off: a product of 8-bit numbers would use it
even in the profile "safe". tests/test_architecture.py (``OF_BLAS``) checks this.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

VARIABLES = ("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")
"""Two names of one switch. A 1 in either variable takes precedence over a 0 in the other (torch ATen/Context.h)."""


def hipblaslt_is_off(environ: Mapping[str, str]) -> bool:
    """Whether the environment variables disable hipBLASLt, by the rules of torch 2.12 and newer."""
    values = [environ.get(name) for name in VARIABLES]
    return "0" in values and "1" not in values


def prefer_rocblas_if_off(environ: Mapping[str, str]) -> None:
    """Prefer rocBLAS in this process if the variables disable hipBLASLt.

    This works even if the torch version ignores a 0 in them.
    """
    if hipblaslt_is_off(environ):
        torch.backends.cuda.preferred_blas_library("cublas")


def preferred() -> str:
    """Return the library that torch prefers now: "cublas", "cublaslt", "ck" or "default"."""
    return str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2].lower()
