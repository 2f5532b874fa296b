"""Refuses training if torch's attention library and its GPU images have different versions.

In other processes that load torch, the rule "attention-misfit" selects plain attention.
"""

from __future__ import annotations

from lora_rocm.errors import MachineError
from lora_rocm.foundation.packages import installer
from lora_rocm.hardware.attention_images import attention_misfit
from lora_rocm.rules.rule import Situation


def require_fitting_attention(situation: Situation) -> None:
    """Check that torch's attention library and its GPU images match, if training on this GPU may use them.

    Raises:
        MachineError: the library and its images have different versions.
    """
    gpu, recipe, torch = situation.gpu, situation.recipe, situation.facts.torch
    plain = recipe is not None and (recipe.runtime.device == "cpu" or recipe.runtime.attention == "math")
    misfit = attention_misfit(torch, gpu.gfx) if gpu is not None and not plain else None
    if misfit is None or torch is None:
        return
    install = installer(situation.facts.system == "windows", repair=True)
    raise MachineError(
        "attention-images-differ",
        f"The installed torch {torch.version} cannot be used: its attention library is AOTriton {misfit.library}, but "
        f"its precompiled GPU kernels are from AOTriton {misfit.images}. Attention would silently return zeros.",
        where=misfit.where,
        fix=f"Install another torch: {install} (lora-rocm doctor has the command for pip). Until then, plain attention "
        "is correct, but slower and takes more memory: --set runtime.attention=math",
    )
