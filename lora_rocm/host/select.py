"""Which GPU a run uses, and how the others are hidden from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_rocm.host.archs import arch_of
from lora_rocm.host.facts import Gpu, HostFacts

VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True)
class Selection:
    """The AMD GPU of a run (None: there is none) and the variable that hides the others from it.

    ``alone``: no other AMD GPU can be reached by the run's processes, so a global variable concerns this one only.
    """

    gpu: Gpu | None
    hide_with: tuple[str, str] | None = None
    alone: bool = True
    by_user: bool = False


def select(facts: HostFacts, environ: Mapping[str, str]) -> Selection:
    """The GPU that the user made visible, else the best: discrete before integrated, known before unknown, then memory.

    With NVIDIA's CUDA build of torch installed the AMD GPU beside it is not the run's, so nothing is selected.
    """
    amd = facts.amd_gpus
    if not amd or (facts.torch is not None and facts.torch.cuda is not None and facts.torch.hip is None):
        return Selection(None)
    asked = _asked(facts, environ)
    if asked is not None:
        return Selection(asked[0] if asked else None, alone=len(asked) <= 1, by_user=True)
    best = max(amd, key=_rank)
    if len(amd) == 1:
        return Selection(best)
    variable = "HIP_VISIBLE_DEVICES" if facts.system == "windows" else "ROCR_VISIBLE_DEVICES"
    return Selection(best, hide_with=(variable, str(best.index)))


def _rank(gpu: Gpu) -> tuple[bool, bool, int, int]:
    return (not gpu.integrated, arch_of(gpu.gfx) is not None, gpu.vram_bytes or 0, -gpu.index)


def _asked(facts: HostFacts, environ: Mapping[str, str]) -> list[Gpu] | None:
    """What the user made visible, in that order; None where no variable says anything that we can read."""
    by_index = {str(gpu.index): gpu for gpu in facts.amd_gpus}
    for variable in VISIBILITY:
        if variable == "ROCR_VISIBLE_DEVICES" and facts.system == "windows":
            continue
        value = environ.get(variable)
        if value is None:
            continue
        words = [word.strip() for word in value.split(",") if word.strip()]
        if all(word in by_index for word in words):
            return [by_index[word] for word in words]
    return None
