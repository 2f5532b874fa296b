"""Rules for AMD GPUs (``amd_rules.toml``), and functions for variable names and values that depend on the machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

from lora_rocm.foundation.tables import by_name, read_table
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.attention_images import attention_misfit
from lora_rocm.hardware.facts import Gpu
from lora_rocm.rules.rule import MachineRule, Situation, release

OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"
STRIX_HALO = "gfx1151"
STRIX_HALO_OVERRIDE = "11.5.1"
PRICE_OF_SAFE = (
    "On RX 9000 this costs speed: matrix products may take several times longer (batched fp16 on gfx1200: 7 TFLOP/s "
    "without hipBLASLt, 54 with it; TheRock#7881). runtime.profile: fast uses it where the self-test passes, best on "
    "ROCm 10.1"
)


def _strix_halo(situation: Situation) -> Gpu | None:
    return next((gpu for gpu in situation.facts.amd_gpus if gpu.gfx == STRIX_HALO), None)


def _global_override(situation: Situation) -> str | None:
    gpu, selection = situation.gpu, situation.selection
    hides_others = selection.hide_with is None or situation.ranks == 1
    chosen = gpu is not None and gpu.gfx == STRIX_HALO and selection.alone and hides_others
    return STRIX_HALO_OVERRIDE if chosen else None


def _node_override(situation: Situation) -> str | None:
    """Return the value of Strix Halo's per-node override variable, or None if the global variable is enough.

    It is not enough if it does not reach the APU, or if the user set another value for the APU's node.
    """
    gpu = _strix_halo(situation)
    if gpu is None or gpu.node is None:
        return None
    hides = f"{OVERRIDE}_{gpu.node}" in situation.environ
    return STRIX_HALO_OVERRIDE if hides or _global_override(situation) is None else None


def _node_override_name(situation: Situation) -> str | None:
    gpu = _strix_halo(situation)
    return f"{OVERRIDE}_{gpu.node}" if gpu is not None else None


def _override(situation: Situation) -> str | None:
    """Return the name of the override variable for the selected GPU, or None if its node is unknown.

    If there are several GPUs, the variable is per node, because the global one would affect all of them.
    """
    if len(situation.facts.amd_gpus) == 1:
        return OVERRIDE
    return f"{OVERRIDE}_{situation.gpu.node}" if situation.gpu is not None and situation.gpu.node is not None else None


def _chosen_gpu(situation: Situation) -> str | None:
    return situation.selection.hide_with[1] if situation.selection.hide_with else None


def _chosen_gpus(situation: Situation) -> str | None:
    return _chosen_gpu(situation) if situation.selection.gpus else None


def _miopen_folder(last: str) -> Callable[[Situation], str | None]:
    """Return a function that returns the path of one of MIOpen's folders, ending in ``last``.

    Each architecture and ROCm version has its own folder, because MIOpen's results for one are wrong for another.
    """

    def planned(situation: Situation) -> str | None:
        gpu, torch = situation.gpu, situation.facts.torch
        if gpu is None or torch is None or torch.hip is None:
            return None
        path: type[PurePath] = PureWindowsPath if situation.facts.system == "windows" else PurePosixPath
        version = ".".join(str(part) for part in release(torch.rocm_version or "")[:2])
        known = gpu.gfx or "unknown"
        return str(path(situation.app_dir) / "miopen" / f"{known}-rocm{version}" / last)

    return planned


def _plain_where_images_differ(situation: Situation) -> str | None:
    gpu = situation.gpu
    misfit = attention_misfit(situation.facts.torch, gpu.gfx) if gpu is not None else None
    return json.dumps("math") if misfit is not None else None


def _cost_of_safe(situation: Situation) -> str:
    """Return a text about the cost of not using hipBLASLt on this GPU; empty if the cost is small."""
    gpu = situation.gpu
    arch = arch_of(gpu.gfx) if gpu is not None else None
    return f". {PRICE_OF_SAFE}" if arch is not None and arch.generation == "rdna4" else ""


FUNCTIONS = {
    **by_name(_global_override, _node_override, _node_override_name, _override, _chosen_gpu, _chosen_gpus),
    **by_name(_plain_where_images_differ, _cost_of_safe),
    "miopen_db": _miopen_folder("db"),
    "miopen_cache": _miopen_folder("cache"),
}


@dataclass(frozen=True)
class LeftAlone:
    """Variables that other programs set and lora-rocm deliberately does not set.

    They are listed in the documentation.
    """

    variables: str
    why: str
    source: str


@dataclass(frozen=True)
class AmdTable:
    """Contents of ``amd_rules.toml``."""

    rule: tuple[MachineRule, ...]
    left_alone: tuple[LeftAlone, ...]


@cache
def amd_table() -> AmdTable:
    """Return the contents of ``amd_rules.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("amd_rules.toml"), AmdTable, FUNCTIONS)


def override_rules() -> tuple[MachineRule, ...]:
    """Return the rules that make a GPU use the kernels of a related architecture."""
    return tuple(rule for rule in amd_table().rule if rule.id.startswith("override-"))
