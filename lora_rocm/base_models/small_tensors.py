"""Reads the small tensors of a base before its weights are loaded: norms and biases. One bad number ruins all."""

from __future__ import annotations

import torch

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.base_models.safetensors_file import read_tensors
from lora_rocm.errors import ModelError

MAX_SMALL_BYTES = 256 << 10
"""Larger tensors are checked when a run has loaded them: reading a whole base takes minutes from a slow disk."""


def require_finite(source: BaseSource) -> None:
    """Refuse a base with a number that is not finite in a small tensor.

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
                        f"The weight {component}.{names[name]} holds numbers that are not finite.",
                        where=str(header.path),
                        fix="Download the model again, or use another edition.",
                    )
