"""The software stack that a verdict holds for, from facts. Standard library only."""

from __future__ import annotations

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.selftest_result import Stack


def stack_of(facts: HostFacts, selection: Selection) -> Stack | None:
    """Torch, runtime, driver and GPU in words; None where there is no torch or no GPU it could use."""
    torch = facts.torch
    if torch is None:
        return None
    if selection.gpu is not None and torch.hip is not None:
        driver = selection.gpu.driver or _linux_driver(facts)
        return Stack(torch.version, f"hip {torch.hip}", driver, selection.gpu.gfx or selection.gpu.name)
    nvidia = next((gpu for gpu in facts.gpus if gpu.vendor == "nvidia"), None)
    if nvidia is not None and torch.cuda is not None:
        return Stack(torch.version, f"cuda {torch.cuda}", nvidia.driver or "unknown", nvidia.name)
    return None


def _linux_driver(facts: HostFacts) -> str:
    """On Linux the driver is part of the kernel, unless a module of its own replaces it."""
    linux = facts.linux
    if linux is None:
        return "unknown"
    return f"{linux.kernel} {linux.amdgpu_version}" if linux.amdgpu_version else linux.kernel
