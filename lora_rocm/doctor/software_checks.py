"""Checks whether Python, torch and related libraries fit each other and this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lora_rocm.doctor.cures import install_for_cpu, install_torch, uninstall, unset, upgrade
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.errors import LoraRocmError, UserError
from lora_rocm.hardware import wheels
from lora_rocm.hardware.archs import TRITON_PACKAGES, Generation, arch_of, has_kernels, triton_takes, triton_versions
from lora_rocm.hardware.facts import Torch
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation, When, release

OLDEST_TORCH = (2, 11)
OLDEST_HIP: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("gfx1151", (7, 2), "wheels before ROCm 7.2 fail on Strix Halo (hipfire#81)"),
    ("", (7, 1), "faults of the older ROCm are not worked around here"),
)
"""(architecture, oldest HIP, reason); empty: any other. 7.1 is the older one of the two that torch 2.13 supports."""
TORCHVISION: dict[tuple[int, ...], tuple[int, int]] = {
    (2, 14): (0, 29),
    (2, 13): (0, 28),
    (2, 12): (0, 27),
    (2, 11): (0, 26),
}
SLOW = "training would run on the CPU, some hundred times slower; a model such as SDXL is out of reach"
KERNELS = "the first operation on the GPU ends in invalid device function, or in a crash"


def _problem(situation: Situation) -> LoraRocmError | None:
    """The error that says why no torch exists for this machine; None if there is one."""
    try:
        wheels.choose(situation.facts, situation.environ)
    except LoraRocmError as error:
        return error
    return None


def _python(situation: Situation, plan: EnvPlan) -> Finding | None:
    error = _problem(situation)
    if error is None or not error.code.startswith("python"):
        return None
    return Finding(
        "python", "breaks", "This Python does not fit", f"Python {situation.facts.python}", error.what, (error.fix,)
    )


def _no_wheel(situation: Situation, plan: EnvPlan) -> Finding | None:
    error, gpu = _problem(situation), situation.gpu
    if error is None or error.code != "no-wheel" or gpu is None:
        return None
    title = f"No torch has working kernels for this GPU on {situation.facts.system.capitalize()}"
    cure = ("Use another GPU. Or train on the CPU (tiny models only):", *install_for_cpu(situation.facts))
    return Finding(
        "no-wheel", "breaks", title, f"{gpu.name}, {gpu.gfx}", error.what, cure, "lora_rocm/hardware/wheels.py"
    )


def _installer_variable(situation: Situation, plan: EnvPlan) -> Finding | None:
    error, torch = _problem(situation), situation.facts.torch
    if not isinstance(error, UserError):
        return None
    set_here = [name for name in wheels.VARIABLES if situation.environ.get(name)]
    return Finding(
        "installer-variable",
        "harms" if torch is not None else "breaks",
        "The installer stops at a variable, so it cannot be told which torch this machine needs",
        "; ".join(f"{name}={situation.environ[name]}" for name in set_here),
        error.what + (" torch is not installed, so nothing can be trained" if torch is None else ""),
        unset(situation, set_here),
        "lora_rocm/hardware/wheels.py",
    )


def _none(situation: Situation, plan: EnvPlan) -> Finding | None:
    if situation.facts.torch is not None or _problem(situation) is not None:
        return None
    cure = install_torch(situation)
    return Finding(
        "torch-none", "breaks", "torch is not installed", "no torch in this Python", "nothing can be trained", cure
    )


def _wrong_build(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch = situation.facts.torch
    if torch is None or _problem(situation) is not None:
        return None
    choice = wheels.choose(situation.facts, situation.environ)
    built = "hip" if torch.hip else "cuda" if torch.cuda else "cpu"
    wanted = {"rocm": "hip", "cuda": "cuda", "cpu": built}[choice.kind or "cpu"]
    if built == wanted or situation.facts.system == "macos":
        return None
    words = {"hip": f"ROCm ({torch.hip})", "cuda": f"NVIDIA's CUDA {torch.cuda}", "cpu": "the CPU alone"}
    gpus = ", ".join(gpu.name for gpu in situation.facts.gpus if gpu.vendor in ("amd", "nvidia"))
    nvidia = [gpu.name for gpu in situation.facts.gpus if gpu.vendor == "nvidia" and built == "cuda"]
    return Finding(
        "torch-wrong-build",
        "harms" if nvidia else "breaks",
        f"The installed torch is built for {words[built]}",
        f"torch {torch.version}; GPU: {gpus}",
        f"training would run on the {nvidia[0]}, for which nobody tunes, and not on the AMD GPU" if nvidia else SLOW,
        install_torch(situation),
    )


def _no_kernels(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu = situation.facts.torch, situation.gpu
    if torch is None or torch.hip is None or gpu is None or gpu.gfx is None or torch.arch_list is None:
        return None
    if _problem(situation) is not None or has_kernels(torch.arch_list, gpu.gfx) or _overridden(torch, plan):
        return None
    if not torch.arch_list:
        title, seen = "This torch has no device code at all", "it has kernels for no GPU"
    else:
        title, seen = f"This torch has no kernels for {gpu.gfx}", f"it has kernels for {', '.join(torch.arch_list)}"
    evidence = f"torch {torch.version}: {seen}; GPU: {gpu.name} ({gpu.gfx})"
    known = arch_of(gpu.gfx) is not None
    level: Level = "breaks"
    cure = install_torch(situation)
    if not known:
        cure = (*cure, "Whether that wheel has kernels for this GPU shows: lora-rocm doctor")
    return Finding("torch-no-kernels", level, title, evidence, KERNELS, cure, "pytorch build.sh; TheRock#5289")


def _overridden(torch: Torch, plan: EnvPlan) -> bool:
    """Whether the plan makes the GPU use the kernels of a related architecture that this torch has."""
    for row in plan.variables:
        if row.variable.startswith("HSA_OVERRIDE_GFX_VERSION") and not row.from_user:
            parts = release(row.value)
            if len(parts) == 3 and f"gfx{parts[0]}{parts[1]}{parts[2]:x}" in (torch.arch_list or ()):
                return True
    return False


def _old(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch = situation.facts.torch
    if torch is None or not () < release(torch.version) < OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return Finding(
        "torch-old",
        "breaks",
        f"torch is older than {oldest}",
        f"torch {torch.version}",
        f"lora-rocm was never run with it; {oldest} is the oldest that was",
        install_torch(situation),
        "pyproject.toml",
    )


def _old_rocm(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu = situation.facts.torch, situation.gpu
    if torch is None or torch.hip is None or gpu is None or release(torch.version) < OLDEST_TORCH:
        return None
    _, oldest, why = next(row for row in OLDEST_HIP if row[0] in (gpu.gfx, ""))
    if not () < release(torch.hip)[:2] < oldest:
        return None
    return Finding(
        "rocm-old",
        "harms",
        f"This torch comes with a ROCm before {'.'.join(map(str, oldest))}",
        f"torch {torch.version}, HIP {torch.hip}",
        why,
        install_torch(situation),
        "hipfire#81; for other GPUs the limit is our choice",
    )


def _only_building(situation: Situation, plan: EnvPlan) -> Finding | None:
    gpu, torch, facts = situation.gpu, situation.facts.torch, situation.facts
    arch = arch_of(gpu.gfx) if gpu is not None else None
    if arch is None or torch is None or torch.hip is None or has_kernels(torch.arch_list, arch.gfx) is False:
        return None
    if _problem(situation) is not None:
        return None
    ours = arch.amd_windows if facts.system == "windows" else arch.amd_linux
    if ours != "building" or (facts.system == "linux" and arch.pytorch_org):
        return None
    return Finding(
        "wheel-building",
        "note",
        f"AMD says of its wheels for {arch.gfx} on {facts.system.capitalize()} only that they build",
        f"{gpu.name if gpu else ''} ({arch.gfx})",
        "they are not among those that AMD calls ready for release; trust the self-test",
        ("lora-rocm doctor",),
        "TheRock SUPPORTED_GPUS.md",
    )


def _wsl_wheel(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, facts = situation.facts.torch, situation.facts
    if not facts.is_wsl or situation.gpu is None or torch is None or torch.hip is None:
        return None
    if not torch.is_pytorch_org_rocm:
        return None
    if situation.verdict is not None:  # the library has started here, and the self-test covered it
        return None
    return Finding(
        "wsl-wheel",
        "harms",
        "This torch is not the one that AMD makes for WSL",
        f"torch {torch.version} is of download.pytorch.org",
        "it may abort when it starts; if the self-test passes, it is good",
        install_torch(situation),
        "unsloth#11212",
    )


def _vision(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, vision = situation.facts.torch, situation.facts.libraries.get("torchvision")
    wanted = TORCHVISION.get(release(torch.version)[:2]) if torch is not None else None
    if vision is None or wanted is None or torch is None or release(vision)[:2] == wanted:
        return None
    version = ".".join(map(str, wanted))
    return Finding(
        "torchvision",
        "harms",
        "torchvision and torch do not belong together",
        f"torchvision {vision}, torch {torch.version}",
        "importing transformers may fail (operator torchvision::nms does not exist)",
        (*uninstall("torchvision"), f"lora-rocm does not need it; the one for this torch is {version}."),
        "TheRock RELEASES.md",
    )


def _triton(situation: Situation, plan: EnvPlan) -> Finding | None:
    torch, gpu, libraries = situation.facts.torch, situation.gpu, situation.facts.libraries
    found = {name.lower().replace("-", "_"): version for name, version in libraries.items()}
    name = next((name for name in TRITON_PACKAGES if name in found), None)
    if torch is None or torch.hip is None or gpu is None or gpu.gfx is None or name is None:
        return None
    if triton_takes(release(found[name]), gpu.gfx) is not False or _problem(situation) is not None:
        return None
    return Finding(
        "triton-gpu",
        "slows",
        f"This Triton compiles nothing for {gpu.gfx}",
        f"{name} {found[name]}; GPU: {gpu.name} ({gpu.gfx})",
        "steps do without this program's Triton kernels: plain PyTorch computes the same, slower and in more memory",
        (
            "Nothing has to be done: training chooses the plain form by itself.",
            f"Versions of Triton that compile for this GPU: {triton_versions(gpu.gfx)}. Each torch brings its own.",
        ),
        "lora_rocm/hardware/archs.py",
    )


@dataclass(frozen=True)
class Beside:
    """A library that is harmful with ROCm. ``below`` None: in every version."""

    package: str
    below: tuple[int, ...] | None
    when: When
    level: Level
    effect: str
    cure: Callable[[], tuple[str, ...]]
    source: str
    id: str = ""
    """The finding's id if it differs from the package."""


CONSUMER = When(generations=("rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4"))
WITHOUT_4BIT: tuple[Generation, ...] = ("rdna1", "vega")
WITH_4BIT = When(
    generations=("rdna2", "rdna3", "rdna3.5", "rdna4", "cdna1", "cdna2", "cdna3", "cdna4"), unknown_too=True
)
BESIDE: tuple[Beside, ...] = (
    Beside(
        "bitsandbytes",
        (0, 50),
        WITH_4BIT,
        "harms",
        "before 0.50 its 4-bit products can be NaN, and it has no kernels for Windows",
        partial(upgrade, "bitsandbytes>=0.50"),
        "bitsandbytes#1887; bitsandbytes installation guide",
    ),
    Beside(
        "bitsandbytes",
        None,
        When(generations=WITHOUT_4BIT),
        "harms",
        "it has no kernels for this GPU, and PEFT loads it where it is installed",
        partial(uninstall, "bitsandbytes"),
        "bitsandbytes installation guide",
        "bitsandbytes-gpu",
    ),
    Beside(
        "xformers",
        None,
        CONSUMER,
        "harms",
        "its wheels are built for CUDA or Instinct: the library is tried first, and fails",
        partial(uninstall, "xformers"),
        "xformers README",
    ),
    Beside(
        "torchao",
        None,
        CONSUMER,
        "harms",
        "of AMD it supports Instinct only and takes other cards for them; PEFT tries it where it is installed",
        partial(uninstall, "torchao"),
        "torchao/utils.py is_Navi4",
    ),
    Beside(
        "transformer_engine",
        None,
        CONSUMER,
        "harms",
        "it is built for Instinct; on RDNA it computes in float32 without a word",
        partial(uninstall, "transformer_engine"),
        "TransformerEngine#520",
    ),
    Beside(
        "deepspeed",
        None,
        CONSUMER,
        "note",
        "nothing here uses it, and accelerate tries it where it is installed",
        partial(uninstall, "deepspeed"),
        "SimpleTuner installation notes",
    ),
    Beside(
        "flash_attn",
        None,
        CONSUMER,
        "note",
        "nothing here uses it: attention is that of torch, which the self-test has looked at",
        partial(uninstall, "flash_attn"),
        "flash-attention README",
    ),
    Beside(
        "amd_aiter",
        None,
        CONSUMER,
        "note",
        "nothing here uses it; its kernels are made for Instinct, those for Radeon are experimental",
        partial(uninstall, "amd-aiter"),
        "AITER README; aiter#1943",
    ),
)


def _beside(row: Beside, situation: Situation, plan: EnvPlan) -> Finding | None:
    names = {name.lower().replace("-", "_"): version for name, version in situation.facts.libraries.items()}
    found = names.get(row.package)
    if found is None or not row.when.holds(situation) or (row.below is not None and release(found) >= row.below):
        return None
    title = f"{row.package} {found} is installed"
    where = f"{row.package} {found} among the packages of this Python"
    return Finding(f"library-{row.id or row.package}", row.level, title, where, row.effect, row.cure(), row.source)


SOFTWARE_CHECKS: dict[str, Check] = {
    "python": _python,
    "no-wheel": _no_wheel,
    "installer-variable": _installer_variable,
    "torch-none": _none,
    "torch-wrong-build": _wrong_build,
    "torch-old": _old,
    "torch-no-kernels": _no_kernels,
    "rocm-old": _old_rocm,
    "torchvision": _vision,
    "triton-gpu": _triton,
    **{f"library-{row.id or row.package}": partial(_beside, row) for row in BESIDE},
    "wheel-building": _only_building,
    "wsl-wheel": _wsl_wheel,
}
