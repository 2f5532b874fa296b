"""Selects the GPU of a run, and the variable that hides the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.hardware.archs import arch_of, has_kernels
from lora_rocm.hardware.facts import Gpu, HostFacts

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
"""In the order in which the runtimes read them. ROCr hides GPUs first (Linux). HIP then numbers the rest by the second
variable, or by the third if the second is empty (ROCm/clr rocclr/device/rocm/rocdevice.cpp, device/pal/paldevice.cpp).
"""


@dataclass(frozen=True)
class Selection:
    """The AMD GPU of a run (None: there is none), and the variable that hides the others.

    alone: the run's processes cannot reach another AMD GPU, so a global variable concerns this GPU only.
    by_user: the user's own variables made the selection.
    """

    gpu: Gpu | None
    hide_with: tuple[str, str] | None = None
    alone: bool = True
    by_user: bool = False
    gpus: tuple[Gpu, ...] = ()
    """With several processes: the AMD GPUs of all of them, if known (``hardware.ranks``)."""


def select(facts: HostFacts, environ: Mapping[str, str]) -> Selection:
    """Select the GPU that the user made visible, else the best.

    Criteria in order: discrete before integrated; the installed torch has kernels for it; it is in the table; more
    memory. If the installed torch is NVIDIA's CUDA build, no AMD GPU is selected.
    """
    amd = facts.amd_gpus
    if not amd or (facts.torch is not None and facts.torch.cuda is not None and facts.torch.hip is None):
        return Selection(None)
    best = max(amd, key=lambda gpu: _rank(gpu, facts))
    if set_by_user(facts, environ):
        asked = visible(facts, environ)
        if asked is None:  # named by UUID, which facts do not have
            return Selection(best, alone=len(amd) == 1, by_user=True)
        return Selection(asked[0] if asked else None, alone=len(asked) <= 1, by_user=True)
    if len(amd) == 1:
        return Selection(best)
    return Selection(best, hide_with=(HIP if facts.system == "windows" else ROCR, str(best.index)))


def set_by_user(facts: HostFacts, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that limit visibility. Windows has no ROCr; HIP ignores an empty list."""
    rocr = (ROCR,) if facts.system != "windows" and ROCR in environ else ()
    return rocr + tuple(name for name in (HIP, CUDA) if environ.get(name))


def visible(facts: HostFacts, environ: Mapping[str, str]) -> list[Gpu] | None:
    """The AMD GPUs that HIP lists, in its order; None if a variable names them by UUID."""
    listed: list[Gpu] | None = sorted(facts.amd_gpus, key=lambda gpu: gpu.index)
    if facts.system != "windows" and ROCR in environ:
        listed = _chosen(listed, environ[ROCR])
    second = environ.get(HIP) or environ.get(CUDA)
    return _chosen(listed, second) if second else listed


def _chosen(listed: Sequence[Gpu] | None, value: str) -> list[Gpu] | None:
    """The GPUs at the listed positions. As in the runtimes, the first position that does not exist ends the list."""
    if listed is None or "GPU-" in value:
        return None
    found: list[Gpu] = []
    for word in value.split(","):
        if not word.strip().isdecimal() or int(word) >= len(listed):
            break
        if listed[int(word)] not in found:
            found.append(listed[int(word)])
    return found


def _rank(gpu: Gpu, facts: HostFacts) -> tuple[bool, bool, bool, int, int]:
    kernels = has_kernels(facts.torch.arch_list if facts.torch else None, gpu.gfx) is not False
    return (not gpu.integrated, kernels, arch_of(gpu.gfx) is not None, gpu.vram_bytes or 0, -gpu.index)
