"""Digests of the frozen base model, to compare it with the base that a checkpoint was trained on.

They are made from the fingerprints of the transfer to the device. So they cost nothing extra, and describe the bytes
that are trained with. A file's size, times and remembered digest can be unchanged although its bytes have changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lora_rocm.adapters.training_adapter import NAME
from lora_rocm.device.transfer import Sent

Seals = dict[str, str]
"""Component and dtype ("unet bfloat16") -> a digest over the fingerprints of its tensors.

The training adapter counts as a component of its own.

The dtype is part of the key because a run may continue in another one (a change after a failure). Its tensors then have
other bytes, but belong to the same base.
"""


def seals_of(sent: Mapping[str, Sent]) -> Seals:
    """Digest frozen tensors, given by name. A layer that an adapter wraps keeps its name in the base."""
    lines: dict[str, list[str]] = {}
    for name, tensor in sent.items():
        component = NAME if f".{NAME}." in name else name.partition(".")[0]
        key = f"{component} {tensor.dtype}".replace("torch.", "")
        lines.setdefault(key, []).append(f"{name.replace('.base_layer.', '.')} {tensor.fingerprint}")
    return {key: hashlib.sha256("\n".join(sorted(found)).encode("utf-8")).hexdigest() for key, found in lines.items()}


def broken(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Sorted keys whose digests differ; keys that only one side has are ignored."""
    return sorted(key for key in before.keys() & now.keys() if before[key] != now[key])
