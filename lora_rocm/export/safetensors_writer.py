"""Writes safetensors files with bytes that depend only on the content.

The library's own writer orders ``__metadata__`` randomly, so this module writes the header: metadata is sorted by name,
tensors by element size and name (as in the library). The file contains no time of day.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_rocm.base_models.safetensors_file import DTYPES, legacy_hash
from lora_rocm.errors import ExportError
from lora_rocm.foundation.safetensors_header import header_bytes

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorFile:
    """The content of a safetensors file. With tensors on the meta device only its size can be computed."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            ExportError: a number is not finite in its dtype, so the file would be unusable.
        """
        for name, tensor in self.tensors.items():
            if not torch.isfinite(tensor).all():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ExportError(
                    "weights-not-finite",
                    f"The file was not written: a trained weight is NaN, or larger than any {dtype} number.",
                    where=name,
                    fix="Lower optim.learning_rate: such weights are unusable. Files saved before are intact.",
                )
        return header_of(self.tensors, self.metadata) + _body(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        body_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return len(header_of(self.tensors, self.metadata)) + body_bytes


def kohya_hashes(tensors: Mapping[str, Tensor], ss_metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the two hashes that kohya's tools and A1111 read from a file's metadata.

    The first is the sha256 of all bytes after the header. The second is the first 8 hex digits of the sha256 of 64 KiB
    at offset 1 MiB. Both are computed for a file that has only the ``ss_`` metadata. (Source:
    ``precalculate_safetensors_hashes`` in kohya's train_util.) For meta tensors the hashes are zeros of the same
    length.
    """
    if any(tensor.is_meta for tensor in tensors.values()):
        return {"sshs_model_hash": "0" * 64, "sshs_legacy_hash": "0" * 8}
    body = _body(tensors)
    whole = header_of(tensors, ss_metadata) + body
    return {"sshs_model_hash": hashlib.sha256(body).hexdigest(), "sshs_legacy_hash": legacy_hash(io.BytesIO(whole))}


def ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs in the order of a safetensors file. The tensors may be on the meta device."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file before its tensor data. The tensors may be on the meta device."""
    return header_bytes(((name, NAMES[each.dtype], tuple(each.shape)) for name, each in ordered(tensors)), metadata)


def _body(tensors: Mapping[str, Tensor]) -> bytes:
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in ordered(tensors)]
    return b"".join(parts)
