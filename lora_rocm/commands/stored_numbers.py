"""Reads the numbers of a safetensors file without torch, for ``model_files.adapter_contents``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.model_files.header import Header, damaged

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
"""Number formats that numpy has, too; BOOL is one byte each."""


class StoredNumbers:
    """Implements ``adapter_contents.Numbers`` for the entries of a header."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._largest: dict[TensorEntry, float] = {}

    def array(self, stored: TensorEntry) -> NDArray[np.float32]:
        with self._header.path.open("rb") as file:
            file.seek(stored.begin)
            content = file.read(stored.end - stored.begin)
        if len(content) != stored.end - stored.begin:
            raise damaged(self._header.path, "it ends inside a tensor", AdapterError)
        with np.errstate(over="ignore"):  # what float32 does not hold becomes infinite, as in a run
            return decoded(stored.dtype, content).reshape(stored.shape)

    def largest(self, stored: TensorEntry) -> float:
        if stored not in self._largest:
            found = self.array(stored)
            self._largest[stored] = float(max(found.max(), -found.min())) if found.size else 0.0
        return self._largest[stored]


def decoded(dtype: str, content: bytes) -> NDArray[np.float32]:
    """Return the numbers of a tensor in a safetensors format as float32."""
    if dtype == "BF16":  # the upper half of float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "F8_E5M2":  # the upper half of float16
        return (np.frombuffer(content, "u1").astype("<u2") << 8).view("<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return np.take(_e4m3(), np.frombuffer(content, "u1"))
    return np.frombuffer(content, DTYPES.get(dtype, "u1")).astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    """Return the number of each code of float8_e4m3fn, which has no infinity (arXiv 2209.05433, table 1)."""
    code = np.arange(256)
    sign, exponent, mantissa = np.where(code < 128, 1.0, -1.0), (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where((code & 127) == 127, np.nan, sign * size).astype(np.float32)
