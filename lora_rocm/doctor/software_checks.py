"""Checks whether Python, torch and related libraries match each other and this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lora_rocm.doctor.cures import install_for_cpu, install_torch, torch_of_the_table, uninstall, unset, upgrade
from lora_rocm.doctor.finding import Check, Finding, finding
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.foundation.tables import by_name, read_table
from lora_rocm.hardware import wheels
from lora_rocm.hardware.archs import arch_of, has_kernels, triton_of, triton_takes, triton_versions
from lora_rocm.hardware.attention_images import attention_misfit
from lora_rocm.hardware.facts import Torch
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation, When, release

OLDEST_TORCH = (2, 11)
SLOW = "training would run on the CPU, hundreds of times slower; a model such as SDXL is out of reach"


@dataclass(frozen=True)
class OldestHip:
    """The oldest HIP version that works on an architecture; without ``gfx``, on all others."""

    hip: tuple[int, ...]
    why: str
    gfx: str = ""


@dataclass(frozen=True)
class PackageConflict:
    """A Python package that is harmful with ROCm.

    below: first version that is harmless, or None if all versions are harmful.
    name: package name or requirement that is passed to ``cure``.
    cure: function that returns the lines to type.
    """

    id: str
    package: str
    when: When
    level: Level
    effect: str
    cure: Callable[[str], tuple[str, ...]]
    name: str
    source: str
    below: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SoftwareTable:
    """Contents of ``software_checks.toml``.

    ``torchvision``: for each torch version, the torchvision that belongs to it.
    """

    torchvision: Mapping[str, str]
    oldest_hip: tuple[OldestHip, ...]
    beside: tuple[PackageConflict, ...]


FUNCTIONS = by_name(uninstall, upgrade)


@cache
def software_table() -> SoftwareTable:
    """Return the contents of ``software_checks.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("software_checks.toml"), SoftwareTable, FUNCTIONS)


def _problem(situation: Situation) -> LoraRocmError | None:
    """Return the error that explains why there is no torch for this machine, or None if there is one."""
    try:
        wheels.choose(situation.facts, situation.environ)
    except LoraRocmError as error:
        return error
    return None


def _python(situation: Situation, plan: EnvPlan) -> Finding | None:
    error = _problem(situation)
    if error is None or not error.code.startswith("python"):
        return None
    return finding("python", situation, error=error)


def _no_wheel(situation: Situation, plan: EnvPlan) -> Finding | None:
    error, gpu = _problem(situation), situation.gpu
    if error is None or error.code != "no-wheel" or gpu is None:
        return None
    title = f"No torch has working kernels for this GPU on {situation.facts.system.capitalize()}"
    cure = ("Use another GPU. Or train on the CPU (tiny models only):", *install_for_cpu(situation.facts))
    return finding("no-wheel", situation, cure=cure, title=title, error=error)


def _installer_variable(situation: Situation, plan: EnvPlan) -> Finding | None:
    error, torch = _problem(situation), situation.facts.torch
    if not isinstance(error, UserError):
        return None
    set_here = [name for name in wheels.VARIABLES if situation.environ.get(name)]
    return finding(
        "installer-variable",
        situation,
        level="harms" if torch is not None else "breaks",
        cure=unset(situation, set_here),
        variables="; ".join(f"{name}={situation.environ[name]}" for name in set_here),
        error=error,
        more=" torch is not installed, so nothing can be trained" if torch is None else "",
    )


def _none(situation: Situation, plan: EnvPlan) -> Finding | None:
    if situation.facts.torch is not None or _problem(situation) is not None:
        return None
    return finding("torch-none", situation, cure=install_torch(situation))


def _wrong_build(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch = situation.facts.torch
    if torch is None or _problem(situation) is not None:
        return None
    choice = wheels.choose(situation.facts, situation.environ)
    built = "hip" if torch.hip else "cuda" if torch.cuda else "cpu"
    wanted = {"rocm": "hip", "cuda": "cuda", "cpu": built}[choice.kind or "cpu"]
    if built == wanted or situation.facts.system == "macos":
        return None
    words = {"hip": f"ROCm ({torch.rocm_version})", "cuda": f"NVIDIA's CUDA {torch.cuda}", "cpu": "the CPU alone"}
    gpus = ", ".join(gpu.name for gpu in situation.facts.gpus if gpu.vendor in ("amd", "nvidia"))
    nvidia = [gpu.name for gpu in situation.facts.gpus if gpu.vendor == "nvidia" and built == "cuda"]
    return finding(
        "torch-wrong-build",
        situation,
        level="harms" if nvidia else "breaks",
        cure=install_torch(situation),
        built_for=words[built],
        gpus=gpus,
        effect=f"training would run on the {nvidia[0]}, for which lora-rocm is not tuned, and not on the AMD GPU"
        if nvidia
        else SLOW,
    )


def _no_kernels(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu = situation.facts.torch, situation.gpu
    if torch is None or torch.hip is None or gpu is None or gpu.gfx is None or torch.arch_list is None:
        return None
    if _problem(situation) is not None or has_kernels(torch.arch_list, gpu.gfx) or _overridden(torch, plan):
        return None
    if not torch.arch_list:
        title, seen = "This torch has no GPU kernels at all", "it has no kernels for any GPU"
    else:
        title, seen = f"This torch has no kernels for {gpu.gfx}", f"it has kernels for {', '.join(torch.arch_list)}"
    evidence = f"torch {torch.version}: {seen}; GPU: {gpu.name} ({gpu.gfx})"
    cure = install_torch(situation)
    if arch_of(gpu.gfx) is None:
        cure = (*cure, "Check whether that wheel has kernels for this GPU: lora-rocm doctor")
    return finding("torch-no-kernels", situation, cure=cure, title=title, evidence=evidence)


def _device_packages(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report packages with kernels for this GPU that are missing or do not match AMD's multi-arch torch."""
    torch, gpu, libraries = situation.facts.torch, situation.gpu, situation.facts.libraries
    if torch is None or gpu is None or gpu.gfx is None or torch.arch_source != "metadata":
        return None
    if not has_kernels(torch.arch_list, gpu.gfx) or _problem(situation) is not None:
        return None
    lacking = wheels.lacking_packages(torch.version, gpu.gfx, libraries)
    if not lacking:
        return None
    return finding("torch-device-packages", situation, cure=install_torch(situation), lacking=", ".join(lacking))


def _overridden(torch: Torch, plan: EnvPlan) -> bool:
    """Whether the plan makes the GPU use kernels of a related architecture, and this torch has them."""
    for row in plan.variables:
        if row.variable.startswith("HSA_OVERRIDE_GFX_VERSION") and not row.from_user:
            parts = release(row.value)
            if len(parts) == 3 and f"gfx{parts[0]}{parts[1]}{parts[2]:x}" in (torch.arch_list or ()):
                return True
    return False


def _attention_images(situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report the version mismatch for which ``rules.attention_refusal`` refuses to start a run."""
    torch, gpu = situation.facts.torch, situation.gpu
    misfit = attention_misfit(torch, gpu.gfx) if gpu is not None else None
    if misfit is None:
        return None
    return finding("attention-images", situation, cure=install_torch(situation), misfit=misfit)


def _old(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch = situation.facts.torch
    if torch is None or not () < release(torch.version) < OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return finding("torch-old", situation, cure=install_torch(situation), oldest=oldest)


def _new(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch = situation.facts.torch
    if torch is None or not wheels.is_newer_than_run(torch):
        return None
    newest = ".".join(map(str, wheels.NEWEST_TORCH))
    return finding("torch-new", situation, cure=torch_of_the_table(situation), newest=newest)


def _old_rocm(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu = situation.facts.torch, situation.gpu
    if torch is None or torch.hip is None or gpu is None or release(torch.version) < OLDEST_TORCH:
        return None
    row = next(row for row in software_table().oldest_hip if row.gfx in (gpu.gfx, ""))
    if not () < release(torch.hip)[:2] < row.hip:
        return None
    oldest = ".".join(map(str, row.hip))
    return finding("rocm-old", situation, cure=install_torch(situation), oldest=oldest, why=row.why)


def _only_building(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu, torch, facts = situation.gpu, situation.facts.torch, situation.facts
    arch = arch_of(gpu.gfx) if gpu is not None else None
    if arch is None or torch is None or torch.hip is None or has_kernels(torch.arch_list, arch.gfx) is False:
        return None
    if _problem(situation) is not None:
        return None
    ours = arch.wheels(facts.system, torch.rocm_version)
    if ours != "building" or (facts.system == "linux" and arch.pytorch_org):
        return None
    return finding("wheel-building", situation, arch=arch, system=facts.system.capitalize())


def _wsl_wheel(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, facts = situation.facts.torch, situation.facts
    if not facts.is_wsl or situation.gpu is None or torch is None or torch.hip is None:
        return None
    if not torch.is_pytorch_org_rocm:
        return None
    if situation.verdict is not None:  # the library has started here, and the self-test covered it
        return None
    return finding("wsl-wheel", situation, cure=install_torch(situation))


def _vision(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, vision = situation.facts.torch, situation.facts.libraries.get("torchvision")
    built_for = ".".join(map(str, release(torch.version)[:2])) if torch is not None else ""
    wanted = software_table().torchvision.get(built_for)
    if vision is None or wanted is None or release(vision)[:2] == release(wanted):
        return None
    return finding("torchvision", situation, cure=uninstall("torchvision"), vision=vision, version=wanted)


def _triton(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu, libraries = situation.facts.torch, situation.gpu, situation.facts.libraries
    found = triton_of(libraries)
    if torch is None or torch.hip is None or gpu is None or gpu.gfx is None or found is None:
        return None
    if triton_takes(found[1], gpu.gfx) is not False or _problem(situation) is not None:
        return None
    return finding("triton-gpu", situation, name=found[0], version=found[1], versions=triton_versions(gpu.gfx))


def _conflict(row: PackageConflict, situation: Situation, plan: EnvPlan) -> Finding | None:
    names = {name.lower().replace("-", "_"): version for name, version in situation.facts.libraries.items()}
    found = names.get(row.package)
    if found is None or not row.when.holds(situation) or (row.below is not None and release(found) >= row.below):
        return None
    title = f"{row.package} {found} is installed"
    where = f"{row.package} {found} among the packages of this Python"
    return Finding(row.id, row.level, title, where, row.effect, row.cure(row.name), row.source)


SOFTWARE_CHECKS: dict[str, Check] = {
    "python": _python,
    "no-wheel": _no_wheel,
    "installer-variable": _installer_variable,
    "torch-none": _none,
    "torch-wrong-build": _wrong_build,
    "torch-old": _old,
    "torch-new": _new,
    "torch-no-kernels": _no_kernels,
    "attention-images": _attention_images,
    "torch-device-packages": _device_packages,
    "rocm-old": _old_rocm,
    "torchvision": _vision,
    "triton-gpu": _triton,
    **{row.id: partial(_conflict, row) for row in software_table().beside},
    "wheel-building": _only_building,
    "wsl-wheel": _wsl_wheel,
}
