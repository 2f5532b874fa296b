"""Writes safetensors files with bytes that depend on the content alone.

The library's own writer orders ``__metadata__`` randomly, so the header is written here: sorted metadata, tensors
sorted by element size and name (as in the library), no time of day.
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
    """The content of a safetensors file. Of tensors on the meta device only the size is known."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The whole file.

        Raises:
            ExportError: a value is not finite in its dtype, so no program could use the file.
        """
        for name, tensor in self.tensors.items():
            if not torch.isfinite(tensor).all():
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ExportError(
                    "weights-not-finite",
                    f"The trained weights are larger than any {dtype} number: the file was not written.",
                    where=name,
                    fix="Lower optim.learning_rate: such weights are unusable. Files saved before are kept.",
                )
        return header_of(self.tensors, self.metadata) + _body(self.tensors)

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        body_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
        return len(header_of(self.tensors, self.metadata)) + body_bytes


def kohya_hashes(tensors: Mapping[str, Tensor], ss_metadata: Mapping[str, str]) -> dict[str, str]:
    """The two hashes that kohya's tools and A1111 read from a file's metadata.

    Source: ``precalculate_safetensors_hashes`` in kohya's train_util: sha256 of all bytes after the header, and the
    first 8 hex digits of sha256 over 64 KiB at 1 MiB; both for a file with the ``ss_`` metadata alone. On the meta
    device they are zeros of the same length.
    """
    if any(tensor.is_meta for tensor in tensors.values()):
        return {"sshs_model_hash": "0" * 64, "sshs_legacy_hash": "0" * 8}
    body = _body(tensors)
    whole = header_of(tensors, ss_metadata) + body
    return {"sshs_model_hash": hashlib.sha256(body).hexdigest(), "sshs_legacy_hash": legacy_hash(io.BytesIO(whole))}


def ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Tensors in the order of a file, by name; they may be on the meta device."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its tensors, which may be on the meta device."""
    return header_bytes(((name, NAMES[each.dtype], tuple(each.shape)) for name, each in ordered(tensors)), metadata)


def _body(tensors: Mapping[str, Tensor]) -> bytes:
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in ordered(tensors)]
    return b"".join(parts)
