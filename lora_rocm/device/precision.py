"""Chooses the device and its compute dtype."""

from __future__ import annotations

import torch

from lora_rocm.errors import RestartError
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.settings import Settings

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Short names of dtypes, used in recipes and in the names of checks."""
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Values of ``train.mixed_precision``, except for "auto", and their dtypes."""


def choose_device(wanted: str, settings: Settings | None = None, index: int = 0) -> torch.device:
    """Return the training device. "auto" selects GPU ``index`` if torch detects a GPU, else the CPU.

    A GPU other than the first also becomes torch's current device.

    Raises:
        RestartError: a GPU was requested, or the plan expects one, but torch detects none or too few.
    """
    available = torch.cuda.is_available()
    if wanted == "auto" and not available and settings is not None and settings.expect_gpu:
        raise RestartError(
            "gpu-not-seen",
            f"PyTorch ({torch.__version__}) is built for this machine's GPU but does not see it.",
            where="runtime.device: auto",
            fix="lora-rocm doctor explains why. To train on the CPU instead: --set runtime.device=cpu",
        )
    if wanted == "gpu" and not available:
        raise RestartError(
            "no-gpu",
            f"The recipe requires a GPU, but PyTorch ({torch.__version__}) sees none.",
            where="runtime.device: gpu",
            fix="Install the PyTorch build for your card, or set runtime.device to auto.",
        )
    if not available or wanted == "cpu":
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise RestartError(
            "no-gpu",
            f"There is no GPU number {index}, on which this process should train: torch sees only "
            f"{torch.cuda.device_count()}.",
            where=f"LOCAL_RANK={index}",
            fix="Start at most one process per GPU; lora-rocm doctor lists the GPUs.",
        )
    if index:
        torch.cuda.set_device(index)
    return torch.device("cuda", index)


def describe(device: torch.device) -> str:
    """Return the device's name for events and the report."""
    if device.type != "cuda":
        return "CPU"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} ({properties.gcnArchName})" if torch.version.hip else str(properties.name)


def compute_dtype(
    mixed_precision: str, device: torch.device, settings: Settings, takes_fp16: bool = True
) -> torch.dtype:
    """Return the dtype of the frozen base model and of its computation (by autocast, or in the LoRA layers).

    "auto" uses the planned precision. If none is planned, a GPU gets bf16 if it is known to support it natively, else
    fp16, which every GPU supports. (``is_bf16_supported`` is always true on HIP: torch/cuda/__init__.py.) A model that
    overflows in fp16 (``takes_fp16`` is false) gets bf16 even on such a GPU, which emulates it.
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
