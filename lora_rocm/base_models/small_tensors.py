"""Checks the small tensors of a base model (norms and biases) before its weights are loaded.

A single number that is not finite would spoil every result.
"""

from __future__ import annotations

import torch

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.errors import ModelError

MAX_SMALL_BYTES = 256 << 10
"""Size limit of this check. Larger tensors are checked when a run has loaded them, because reading a whole base model
from a slow disk takes minutes.
"""


def require_finite(source: BaseSource) -> None:
    """Refuse a base model if a small tensor has a number that is not finite.

    Raises:
        ModelError: weights-not-finite.
    """
    for component in source.layout.parts:
        headers, _ = source.weights(component)
        names = source.read_names(component)  # includes converted tensors, such as one bias that three layers share
        for header in headers:
            small = {
                name
                for name, entry in header.tensors.items()
                if name in names and 0 < entry.end - entry.begin <= MAX_SMALL_BYTES
            }
            for name, tensor in read_tensors(header, small.__contains__).items():
                if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                    raise ModelError(
                        "weights-not-finite",
                        f"The weight {component}.{names[name]} contains numbers that are not finite.",
                        where=str(header.path),
                        fix="Download the model again, or use another version.",
                    )
