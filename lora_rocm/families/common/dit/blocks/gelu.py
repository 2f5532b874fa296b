"""The first layer of an ungated feed-forward network, with GELU as activation."""

from __future__ import annotations

from typing import Any

from diffusers.models.activations import GELU
from torch import Tensor

from lora_rocm.kernels.backend import Implementation
from lora_rocm.kernels.gated import Activation, activated

ACTIVATIONS: dict[str, Activation] = {"none": "gelu", "tanh": "gelu-tanh"}
"""Fused activations by the value of diffusers' ``approximate``."""


class FusedGelu(GELU):
    """The layer with an in-place activation, which is safe because nothing else reads the projection's output."""

    implementation: Implementation

    @staticmethod
    def fits(module: Any) -> bool:
        return module.approximate in ACTIVATIONS

    def gelu(self, gate: Tensor) -> Tensor:
        return activated(ACTIVATIONS[self.approximate], self.implementation, gate)
