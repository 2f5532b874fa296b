"""Compare the base on the device with the base that a checkpoint was trained on.

The fingerprints are those of the transfer, so they cost nothing more, and they are of the bytes that are trained with:
size, times and a remembered digest of a file can be what they were although its bytes are not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from lora_rocm.device.transfer import Sent

Seals = dict[str, str]
"""Component and number format ("unet bfloat16") -> a digest over the fingerprints of all such tensors.

The format is part of the name because a run may go on in another (a change after a failure): its tensors have other
bytes, and are the same base.
"""


def seals_of(sent: Mapping[str, Sent]) -> Seals:
    """Of frozen tensors by name; where an adapter wraps a layer, the layer has its name in the base."""
    lines: dict[str, list[str]] = {}
    for name, tensor in sent.items():
        component = f"{name.partition('.')[0]} {tensor.dtype}".replace("torch.", "")
        lines.setdefault(component, []).append(f"{name.replace('.base_layer.', '.')} {tensor.fingerprint}")
    return {key: hashlib.sha256("\n".join(sorted(found)).encode("utf-8")).hexdigest() for key, found in lines.items()}


def broken(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names of the seals that both have and that differ."""
    return sorted(key for key in before.keys() & now.keys() if before[key] != now[key])
