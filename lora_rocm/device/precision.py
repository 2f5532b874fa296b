"""Which device, and which number format it computes in."""

from __future__ import annotations

import torch

from lora_rocm.errors import MachineError

NO_BF16_ARCHITECTURES = ("gfx10", "gfx900", "gfx906")
"""RDNA 1 and 2, Vega: no native bf16, although ``is_bf16_supported`` is always true on HIP (torch/cuda/__init__.py)."""


def choose_device(wanted: str) -> torch.device:
    """``auto`` takes a GPU where torch sees one.

    Raises:
        MachineError: a GPU was asked for and torch sees none.
    """
    available = torch.cuda.is_available()
    if wanted == "gpu" and not available:
        raise MachineError(
            "no-gpu",
            f"The recipe asks for a GPU, and this PyTorch ({torch.__version__}) sees none.",
            where="runtime.device: gpu",
            fix="Install the PyTorch build for your card, or set runtime.device to auto.",
        )
    return torch.device("cuda", 0) if available and wanted != "cpu" else torch.device("cpu")


def describe(device: torch.device) -> str:
    """The device in words, for events and the report."""
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.gcnArchName})" if torch.version.hip else str(properties.name)


def compute_dtype(mixed_precision: str, device: torch.device) -> torch.dtype:
    """The dtype of the frozen base and of autocast; the adapter itself is always float32."""
    fixed = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if mixed_precision in fixed:
        return fixed[mixed_precision]
    if device.type != "cuda":
        return torch.float32
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        return torch.float16 if arch.startswith(NO_BF16_ARCHITECTURES) else torch.bfloat16
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
