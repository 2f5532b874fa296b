"""Selects the GPU of a run, and the environment variable that hides the other GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.hardware.archs import arch_of, has_kernels
from lora_rocm.hardware.facts import Gpu, HostFacts

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
"""Last of the three visibility variables, which the runtimes read in this order. First, ROCr hides GPUs (Linux). HIP
then numbers the remaining GPUs by the second variable, or by the third if the second is empty (ROCm/clr
rocclr/device/rocm/rocdevice.cpp, device/pal/paldevice.cpp).
"""


@dataclass(frozen=True)
class Selection:
    """The AMD GPU of a run, or None if there is none, and the variable that hides the other GPUs.

    alone: whether the run's processes can reach no other AMD GPU. A global variable then affects this GPU only.
    by_user: whether the user's own variables made the selection.
    """

    gpu: Gpu | None
    hide_with: tuple[str, str] | None = None
    alone: bool = True
    by_user: bool = False
    gpus: tuple[Gpu, ...] = ()
    """AMD GPUs of all processes of a run with several processes, if known (``hardware.ranks``)."""


def select(facts: HostFacts, environ: Mapping[str, str]) -> Selection:
    """Select the GPU that the user made visible, or else the best one.

    Criteria in order: a discrete GPU; kernels for it in the installed torch; a row in the architecture table; more
    memory. If the installed torch is a CUDA build, no AMD GPU is selected.
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
    """Return the names of the variables with which the user limits the visible GPUs.

    On Windows, ROCr's variable is ignored, because ROCr does not exist there. HIP ignores an empty list.
    """
    rocr = (ROCR,) if facts.system != "windows" and ROCR in environ else ()
    return rocr + tuple(name for name in (HIP, CUDA) if environ.get(name))


def visible(facts: HostFacts, environ: Mapping[str, str]) -> list[Gpu] | None:
    """Return the AMD GPUs that HIP lists, in HIP's order; None if a variable selects them by UUID."""
    listed: list[Gpu] | None = sorted(facts.amd_gpus, key=lambda gpu: gpu.index)
    if facts.system != "windows" and ROCR in environ:
        listed = _chosen(listed, environ[ROCR])
    second = environ.get(HIP) or environ.get(CUDA)
    return _chosen(listed, second) if second else listed


def _chosen(listed: Sequence[Gpu] | None, value: str) -> list[Gpu] | None:
    """Return the GPUs at the positions listed in ``value``; None if they are given as UUIDs.

    As in the runtimes, the list ends at the first position that does not exist.
    """
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
