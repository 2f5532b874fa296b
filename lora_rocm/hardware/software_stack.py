"""The software stack of a machine, computed from facts. Standard library only."""

from __future__ import annotations

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.selftest_result import SoftwareAndGpu

STACK = "LORA_ROCM_STACK"
"""The variable by which a heavy process learns ``SoftwareAndGpu.key``; empty without a GPU."""


def stack_of(facts: HostFacts, selection: Selection) -> SoftwareAndGpu | None:
    """Torch, runtime, driver and GPU as text; None without torch or without a usable GPU."""
    torch = facts.torch
    if torch is None:
        return None
    if selection.gpu is not None and torch.hip is not None:
        driver = selection.gpu.driver or _linux_driver(facts)
        return SoftwareAndGpu(torch.version, f"hip {torch.hip}", driver, selection.gpu.gfx or selection.gpu.name)
    nvidia = next((gpu for gpu in facts.gpus if gpu.vendor == "nvidia"), None)
    if nvidia is not None and torch.cuda is not None:
        return SoftwareAndGpu(torch.version, f"cuda {torch.cuda}", nvidia.driver or "unknown", nvidia.name)
    return None


def _linux_driver(facts: HostFacts) -> str:
    """The kernel version, because the kernel contains the driver, plus the version of a separate amdgpu module."""
    linux = facts.linux
    if linux is None:
        return "unknown"
    return f"{linux.kernel} {linux.amdgpu_version}" if linux.amdgpu_version else linux.kernel
