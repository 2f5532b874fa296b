"""Rules for AMD GPUs: the owner's two first, then the table."""

from __future__ import annotations

from lora_rocm.host.facts import Gpu
from lora_rocm.host.quirks import Harm, Rule, Situation, When

STRIX_HALO = "gfx1151"
STRIX_HALO_OVERRIDE = "11.5.1"


def _strix_halo(situation: Situation) -> Gpu | None:
    return next((gpu for gpu in situation.facts.amd_gpus if gpu.gfx == STRIX_HALO), None)


def _global_override(situation: Situation) -> str | None:
    gpu, selection = situation.gpu, situation.selection
    return STRIX_HALO_OVERRIDE if gpu is not None and gpu.gfx == STRIX_HALO and selection.alone else None


def _node_override(situation: Situation) -> str | None:
    gpu = _strix_halo(situation)
    wanted = gpu is not None and gpu.node is not None and _global_override(situation) is None
    return STRIX_HALO_OVERRIDE if wanted else None


def _node_variable(situation: Situation) -> str:
    gpu = _strix_halo(situation)
    return f"HSA_OVERRIDE_GFX_VERSION_{gpu.node if gpu else ''}"


AMD_RULES: tuple[Rule, ...] = (
    Rule(
        "owner-ipc",
        "HIP_DISABLE_IPC",
        "1",
        "set on AMD by decision of this project; no runtime was found that reads it. The rule behind it is kept in "
        "code: no tensor of a GPU ever crosses to another process",
        "lora-rocm design, section 6",
        over_user=True,
    ),
    Rule(
        "owner-gfx1151",
        "HSA_OVERRIDE_GFX_VERSION",
        _global_override,
        "replaces a poisoned value that other tools leave behind (11.0.0 crashes gfx1151); the card's own version, so "
        "it changes nothing else, and Windows does not read it",
        "lora-rocm design, section 6; unsloth#8480; TheRock#1719",
        When(gfx=(STRIX_HALO,)),
        over_user=True,
    ),
    Rule(
        "owner-gfx1151-node",
        _node_variable,
        _node_override,
        "as owner-gfx1151, for the APU's own node: the global variable would break the card beside it",
        "lora-rocm design, section 6; libhsakmt src/topology.c reads the node's variable first",
        When(systems=("linux",)),
        over_user=True,
    ),
)

HARMS: tuple[Harm, ...] = ()
