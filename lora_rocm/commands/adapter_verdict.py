"""Check for ``lora-rocm inspect`` whether ``lora.init_from`` can start a run from an adapter file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_rocm.errors import AdapterError
from lora_rocm.families.registry import FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.foundation.safetensors_header import TensorEntry
from lora_rocm.foundation.terminal_text import one_line
from lora_rocm.model_files.adapter_contents import NOT_UNDERSTOOD, contents_of, not_understood, other_axis
from lora_rocm.model_files.adapter_parts import Notify
from lora_rocm.model_files.header import TensorFileHeader, damaged
from lora_rocm.model_files.peft_folder import PEFT_WEIGHTS, read_peft_config

MAX_SHOWN = 200
MAX_NAMED = 3
LIMITS_HERE = ("lora-kind", "lora-magnitudes", "init-from-axis")
"""Error codes of intact files that this program does not read, although other programs may.

Any other code means a faulty file.
"""

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
"""numpy dtype of each number format that numpy supports. BOOL takes one byte."""


def peft_config(header: TensorFileHeader) -> Mapping[str, Any] | None:
    """Return the config of the PEFT folder that contains the file, or None if the file is not in one."""
    return read_peft_config(header.path.parent) if header.path.name == PEFT_WEIGHTS else None


def _refusal(
    header: TensorFileHeader, config: Mapping[str, Any] | None, spec: FamilySpec, numbers: StoredNumbers, notify: Notify
) -> AdapterError | None:
    """Return the error with which a family's run refuses to start from an adapter file, or None if it can start."""
    path = header.path
    try:
        found = contents_of(
            spec.name,
            header.tensors,
            path,
            numbers,
            metadata=header.metadata,
            peft=config,
            with_norms=spec.trains_norms,
            notify=notify,
        )
    except AdapterError as error:
        return error
    except NOT_UNDERSTOOD as error:
        return not_understood(error, path)
    if not found.unknown:
        axis = next((each for each in found.modules if each.per_input), None)
        return None if axis is None else other_axis(axis.key, axis.parts["dora_scale"].shape, path)
    others = f", and {len(found.unknown) - 1} more modules of this file" if len(found.unknown) > 1 else ""
    what = f"{spec.title} has no module {one_line(found.unknown[0])[:MAX_SHOWN]}{others}."
    names = sorted(name for name in header.tensors if name.startswith(found.unknown[0])) or found.unknown
    named = one_line(", ".join(names[:MAX_NAMED]))[:MAX_SHOWN]
    fix = f"Use a LoRA that was made for {spec.title}. In this one the tensors are {named}."
    return AdapterError("lora-of-another-model", what, where=str(path), fix=fix)


def refusals(
    header: TensorFileHeader, families: Sequence[str], registry: FamilyRegistry, notify: Notify = lambda text: None
) -> dict[str, AdapterError]:
    """Return the error with which each family's runs refuse to start from the file.

    Families that accept it are omitted.

    Args:
        header: header of the adapter file.
        families: names of the families to check.
        registry: the trainable families.
        notify: receives notices.
    """
    config, errors, numbers = peft_config(header), dict[str, AdapterError](), StoredNumbers(header)
    for name in families:
        if name in registry and (error := _refusal(header, config, registry[name], numbers, notify)) is not None:
            errors[name] = error
    return errors


def has_fault(refused: Mapping[str, AdapterError]) -> bool:
    """Return whether a refused file is damaged or of another model, so that no other program can use it either."""
    return any(error.code not in LIMITS_HERE for error in refused.values())


class StoredNumbers:
    """The numbers of a safetensors file, read without torch. Implements ``adapter_contents.Numbers``."""

    def __init__(self, header: TensorFileHeader) -> None:
        self._header = header
        self._largest: dict[TensorEntry, float] = {}

    def array(self, stored: TensorEntry) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite, as in a run
            return decoded(stored.dtype, self._content(stored)).reshape(stored.shape)

    def _content(self, stored: TensorEntry) -> bytes:
        with self._header.path.open("rb") as file:
            file.seek(stored.begin)
            content = file.read(stored.end - stored.begin)
        if len(content) != stored.end - stored.begin:
            raise damaged(self._header.path, "it ends inside a tensor", AdapterError)
        return content

    def largest(self, stored: TensorEntry) -> float:
        if stored not in self._largest:
            if stored.dtype in ("F16", "BF16"):  # without their sign, their codes are in the order of their sizes
                codes = np.frombuffer(self._content(stored), "<u2") & 0x7FFF
                found = decoded(stored.dtype, np.array(codes.max(), "<u2").tobytes()) if codes.size else codes
            else:
                found = self.array(stored)
            self._largest[stored] = float(max(found.max(), -found.min())) if found.size else 0.0
        return self._largest[stored]


def decoded(dtype: str, content: bytes) -> NDArray[np.float32]:
    """Return a tensor's numbers as float32. ``dtype`` is the name of a safetensors number format."""
    if dtype == "BF16":  # the upper half of float32
        return (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
    if dtype == "F8_E5M2":  # the upper half of float16
        return (np.frombuffer(content, "u1").astype("<u2") << 8).view("<f2").astype(np.float32)
    if dtype == "F8_E4M3":
        return np.take(_e4m3(), np.frombuffer(content, "u1"))
    return np.frombuffer(content, DTYPES.get(dtype, "u1")).astype(np.float32)


def _e4m3() -> NDArray[np.float32]:
    """Return the value of each of the 256 codes of float8_e4m3fn, which has no infinity (arXiv 2209.05433, table 1)."""
    code = np.arange(256)
    sign, exponent, mantissa = np.where(code < 128, 1.0, -1.0), (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where((code & 127) == 127, np.nan, sign * size).astype(np.float32)
