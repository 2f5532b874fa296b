"""Chooses the device and its compute dtype."""

from __future__ import annotations

import torch

from lora_rocm.errors import RestartError
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.settings import Settings

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The short names of dtypes, in recipes and in the names of checks."""
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of ``train.mixed_precision``."""


def choose_device(wanted: str, settings: Settings | None = None, index: int = 0) -> torch.device:
    """The training device. ``auto`` takes GPU number ``index`` if torch sees one, and makes it the current one.

    Raises:
        RestartError: a GPU was requested, or is expected by the plan, and torch sees none or too few.
    """
    available = torch.cuda.is_available()
    if wanted == "auto" and not available and settings is not None and settings.expect_gpu:
        raise RestartError(
            "gpu-not-seen",
            f"This machine has a GPU, and this PyTorch ({torch.__version__}) is one for it but does not see it.",
            where="runtime.device: auto",
            fix="lora-rocm doctor explains why. To train on the CPU instead: --set runtime.device=cpu",
        )
    if wanted == "gpu" and not available:
        raise RestartError(
            "no-gpu",
            f"The recipe asks for a GPU, and this PyTorch ({torch.__version__}) sees none.",
            where="runtime.device: gpu",
            fix="Install the PyTorch build for your card, or set runtime.device to auto.",
        )
    if not available or wanted == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise RestartError(
            "no-gpu",
            f"This process is to train on GPU {index}, and torch sees {torch.cuda.device_count()}.",
            where=f"LOCAL_RANK={index}",
            fix="Start no more processes than there are GPUs; lora-rocm doctor lists them.",
        )
    if index:
        torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe(device: torch.device) -> str:
    """The device's name, for events and the report."""
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.gcnArchName})" if torch.version.hip else str(properties.name)


def compute_dtype(
    mixed_precision: str, device: torch.device, settings: Settings, takes_fp16: bool = True
) -> torch.dtype:
    """The dtype of the frozen base and of computation with it (autocast, or the LoRA layers' own copies).

    ``auto`` follows the plan. Without a planned precision, a GPU gets bf16 if it is known to compute it natively, else
    fp16, which every GPU computes. (``is_bf16_supported`` is always true on HIP: torch/cuda/__init__.py.) A model
    with products that overflow fp16 (not ``takes_fp16``) gets bf16 there, which such a GPU emulates.
    """
    if mixed_precision != "auto":
        return DTYPES[mixed_precision]
    if device.type != "cuda":
        return torch.float32
    found = settings.precision or ("bf16" if _has_bf16(device) else "fp16")
    return DTYPES["bf16" if found == "fp16" and not takes_fp16 else found]


def _has_bf16(device: torch.device) -> bool:
    if torch.version.hip:
        arch = arch_of(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
        return arch is not None and arch.bf16
    return torch.cuda.get_device_capability(device) >= (8, 0)
