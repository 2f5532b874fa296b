"""Which form of the kernels runs: Triton's, or plain PyTorch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch

Form = Literal["eager", "triton"]


def available(device: torch.device) -> bool:
    """Whether Triton kernels can run there: a GPU, and a Triton to compile for it (Windows ROCm builds have none).

    The meta device stands for a GPU: what lies there is only counted, and takes what the kernels would.
    """
    return device.type in ("cuda", "meta") and find_spec("triton") is not None


def form_for(device: torch.device, triton: bool = True) -> Form:
    """The form to use on a device; ``triton=False`` asks for plain PyTorch."""
    return "triton" if triton and available(device) else "eager"
