"""The software stack of a machine, computed from facts. Standard library only."""

from __future__ import annotations

from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import Selection
from lora_rocm.hardware.selftest_result import SoftwareAndGpu

STACK = "LORA_ROCM_STACK"
"""Name of the variable that passes ``SoftwareAndGpu.key`` to the processes that load torch; its value is empty without
a GPU.
"""


def stack_of(facts: HostFacts, selection: Selection) -> SoftwareAndGpu | None:
    """Return torch, runtime, driver and GPU as texts, or None if torch or a usable GPU is missing."""
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
    """Return the kernel version, followed by the version of a separate amdgpu module if there is one.

    The kernel contains the driver, so its version is also the driver's.
    """
    linux = facts.linux
    if linux is None:
        return "unknown"
    return f"{linux.kernel} {linux.amdgpu_version}" if linux.amdgpu_version else linux.kernel
