"""Chooses the torch for a machine and its package index from ``wheels.toml``, with the reason for the choice.

Standard library only, because the installer uses it before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from lora_rocm.errors import MachineError, UserError
from lora_rocm.foundation.tables import read_table
from lora_rocm.hardware.archs import arch_of, has_kernels
from lora_rocm.hardware.facts import Gpu, HostFacts, System, Torch
from lora_rocm.hardware.gpu_select import Selection, select

Kind = Literal["rocm", "cuda", "cpu"]

ANY_TORCH = "torch>=2.11"  # as pyproject.toml
NEWEST_TORCH = (2, 13)
"""The newest torch with which this program was tested. A newer one may be installed, but the user gets a notice."""
PYTHONS = ((3, 11), (3, 14))
"""Oldest and newest Python for which every index below has wheels (TheRock RELEASES.md; torch 2.13)."""
TORCH_VARIABLE, INDEX_VARIABLE = VARIABLES = "LORA_ROCM_TORCH", "LORA_ROCM_TORCH_INDEX"


@dataclass(frozen=True)
class Index:
    """A package index that has torch.

    url: address of the index, or None for pip's default index.
    torch: requirement to install. ``{gfx}`` is replaced by the name of the architecture's extra.
    """

    id: str
    kind: Kind
    systems: tuple[System, ...]
    torch: str
    what: str
    source: str
    reviewed: str
    url: str | None = None
    rocm: str = ""
    only_asked: bool = False
    """Whether the index is used only on the user's request, or if no other index has kernels (``WheelTable.only_in``).
    """


@dataclass(frozen=True)
class Known:
    """A known fault of an index's wheel on certain architectures."""

    index: str
    system: System
    gfx: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class LeadsTo:
    """The kind of torch that is expected from a requirement or URL outside the table, if it matches ``pattern``."""

    pattern: str
    kind: Kind


@dataclass(frozen=True)
class WheelTable:
    """Contents of ``wheels.toml``.

    wsl: warning about WSL.
    second_class: note for the user about each kind of torch.
    unserved: for each architecture without any usable wheel, the reason.
    as_cpu: for each integrated GPU that is used only on request, the reason.
    only_in: for architectures that archs.toml lacks, the index that has an extra for them.
    oldest_drm: for each ROCm version, the oldest version of the amdgpu driver's interface that it needs.
    """

    wsl: str
    second_class: Mapping[Kind, str]
    unserved: Mapping[str, str]
    as_cpu: Mapping[str, str]
    only_in: Mapping[str, str]
    oldest_drm: Mapping[str, tuple[int, ...]]
    index: tuple[Index, ...]
    known: tuple[Known, ...]
    leads_to: tuple[LeadsTo, ...]


@cache
def wheel_table() -> WheelTable:
    """Return the contents of ``wheels.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("wheels.toml"), WheelTable)


@cache
def indexes() -> Mapping[str, Index]:
    """Return the indexes by their id."""
    return {index.id: index for index in wheel_table().index}


@dataclass(frozen=True)
class WheelChoice:
    """The torch requirement to install, and the index to install it from.

    url: address of the index, or None for pip's default index.
    kind: kind of torch that the installation must result in; None if the user chose the source and the kind is unknown.
    else_default: whether to use pip's default index if ``url`` does not respond.
    """

    requirement: str
    url: str | None
    why: str
    kind: Kind | None
    gfx: str | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    else_default: bool = False
    by_user: bool = False
    override: str | None = None
    """HSA_OVERRIDE_GFX_VERSION with which kernels of another architecture run on this GPU (Linux), or None."""
    for_wsl: bool = False


@dataclass(frozen=True)
class _Use:
    """The kind of torch that training will use on this machine, and notes on GPUs that it will not use."""

    kind: Kind
    gpu: Gpu | None
    why: str
    notes: tuple[str, ...] = ()


def choose(facts: HostFacts, environ: Mapping[str, str]) -> WheelChoice:
    """Choose the torch for a machine. The torch that is already installed does not matter.

    Raises:
        MachineError: there is no torch for this machine. The message gives the reason and a remedy.
        UserError: LORA_ROCM_TORCH or LORA_ROCM_TORCH_INDEX is invalid.
    """
    use = _use(facts, select(replace(facts, torch=None), environ))
    asked, place = environ.get(TORCH_VARIABLE, "").strip(), environ.get(INDEX_VARIABLE, "").strip()
    _check_python(facts, bool(asked or place))
    if asked or place:
        return _as_asked(facts, use, asked, place)
    if use.kind == "rocm" and use.gpu is not None:
        return _rocm(facts, use.gpu, use.notes)
    if use.kind == "cuda":
        index = indexes()["cuda-windows" if facts.system == "windows" else "cuda"]
    else:
        index = indexes()["macos" if facts.system == "macos" else "cpu"]
    notes = (*use.notes, wheel_table().second_class[use.kind])
    return WheelChoice(index.torch, index.url, use.why, use.kind, notes=notes, else_default=index.id == "cpu")


def _check_python(facts: HostFacts, asked: bool) -> None:
    found = re.match(r"(\d+)\.(\d+).*?(?:(\d+)-bit)?$", facts.python)
    if found is None:
        return
    version, bits = (int(found[1]), int(found[2])), found[3]
    oldest, newest = (".".join(map(str, bound)) for bound in PYTHONS)
    fix = f"Install a 64-bit Python from {oldest} to {newest}, and run this again with it."
    if bits == "32":
        raise MachineError("python-32-bit", "There is no torch for a 32-bit Python.", where=facts.python, fix=fix)
    if version < PYTHONS[0] or (version > PYTHONS[1] and not asked):
        what = f"torch has no wheels for this Python version: Python {oldest} to {newest} is needed."
        raise MachineError("python-unfit", what, where=f"Python {facts.python}", fix=fix)


def _use(facts: HostFacts, selection: Selection) -> _Use:
    """Choose the GPU and with it the kind of torch.

    An AMD GPU precedes an NVIDIA one, but a discrete NVIDIA GPU precedes an integrated or unknown AMD GPU.
    """
    nvidia = next((gpu for gpu in facts.gpus if gpu.vendor == "nvidia"), None)
    amd = None if facts.system == "macos" else selection.gpu
    if amd is not None and not selection.by_user:
        weak = wheel_table().as_cpu.get(amd.gfx or "")
        hint = f" To use it anyway: {INDEX_VARIABLE}=amd" if arch_of(amd.gfx) is not None else ""
        if nvidia is not None and (amd.integrated or arch_of(amd.gfx) is None):
            note = f"{named(amd)} is not used: training uses the NVIDIA card.{hint}"
            return _Use("cuda", nvidia, f"there is an NVIDIA GPU ({nvidia.name}).", (note,))
        if weak is not None:
            note = f"{named(amd)} is not used: {weak}.{hint}"
            return _Use("cpu", amd, "no GPU is fast enough for training, so the build is for the CPU.", (note,))
    if amd is not None:
        return _Use("rocm", amd, "", _skipped(facts, amd))
    hidden = selection.by_user and facts.system != "macos"
    notes = ("a variable such as HIP_VISIBLE_DEVICES hides every AMD GPU",) if hidden else ()
    if nvidia is not None:
        return _Use("cuda", nvidia, f"there is an NVIDIA GPU ({nvidia.name}).", notes)
    if facts.system == "macos":
        return _Use(
            "cpu", None, "this is a Mac; lora-rocm does not use Apple's GPU, so training runs on the CPU.", notes
        )
    return _Use("cpu", None, "no GPU was found that training can use, so the build is for the CPU.", notes)


def _skipped(facts: HostFacts, used: Gpu) -> tuple[str, ...]:
    index = "cuda-windows" if facts.system == "windows" else "cuda"
    instead = f"AMD GPUs take precedence. To use it: {INDEX_VARIABLE}={index}"
    nvidia = tuple(f"{gpu.name} is not used: {instead}" for gpu in facts.gpus if gpu.vendor == "nvidia")
    others = dict.fromkeys(gpu for gpu in facts.amd_gpus if gpu.gfx != used.gfx)
    variable = "HIP_VISIBLE_DEVICES" if facts.system == "windows" else "ROCR_VISIBLE_DEVICES"
    return nvidia + tuple(f"{named(gpu)} is not used. To use it: {variable}={gpu.index}" for gpu in others)


def named(gpu: Gpu) -> str:
    """Return a GPU's name and architecture: "Radeon RX 7900 XTX (gfx1100)"."""
    return f"{gpu.name} ({gpu.gfx or 'architecture unknown'})"


def _rocm(facts: HostFacts, gpu: Gpu, notes: tuple[str, ...]) -> WheelChoice:
    arch, windows = arch_of(gpu.gfx), facts.system == "windows"
    if unserved := wheel_table().unserved.get(gpu.gfx or ""):
        raise _no_wheel(gpu, unserved)
    if arch is None:
        if gpu.gfx is not None and (name := wheel_table().only_in.get(gpu.gfx)) is not None:
            index = indexes()[name]
            why = f"{named(gpu)} is not in our table; this is AMD's only index with kernels for it."
            made = WheelChoice(index.torch.format(gfx=gpu.gfx), index.url, why, "rocm", gpu.gfx, notes=notes)
            return _warned(facts, gpu, index, made)
        why = f"{named(gpu)} is not in our table: AMD's wheel with kernels for all AMD GPUs is the safe choice."
        warning = "the download is about 10 GB; only the installed wheel shows whether it has kernels for this GPU"
        index = indexes()["amd"]
        made = WheelChoice(index.torch.format(gfx="all"), index.url, why, "rocm", gpu.gfx, (warning,))
        return _warned(facts, gpu, index, replace(made, notes=notes))
    index = indexes()["pytorch" if arch.pytorch_org and facts.system == "linux" and not facts.is_wsl else "amd"]
    why = f"{named(gpu)}: {index.what} have kernels for it."
    if index.id == "amd":
        if facts.is_wsl:
            why += " Wheels of download.pytorch.org may abort under WSL (unsloth#11212)."
        elif arch.override and not windows:
            why += f" So no HSA_OVERRIDE_GFX_VERSION={arch.override} is needed, unlike with download.pytorch.org's."
        if arch.wheels(facts.system, index.rocm) == "none":
            reported = f"; reported: {arch.reported}" if arch.reported else ""
            raise _no_wheel(gpu, f"AMD lists no wheel for it on {facts.system.capitalize()}{reported}")
    override = None if windows else arch.override
    made = WheelChoice(index.torch.format(gfx=arch.gfx), index.url, why, "rocm", arch.gfx, notes=notes)
    return _warned(facts, gpu, index, replace(made, override=override, for_wsl=facts.is_wsl))


def _warned(facts: HostFacts, gpu: Gpu, index: Index, choice: WheelChoice) -> WheelChoice:
    """Return the choice, with warnings about the known faults of this index on this machine."""
    table, warnings, arch = wheel_table(), list(choice.warnings), arch_of(gpu.gfx)
    if arch is not None and index.id != "pytorch" and arch.wheels(facts.system, index.rocm) == "building":
        system = facts.system.capitalize()
        warnings.append(
            f"{arch.gfx}, {system}: AMD states only that its wheels build, not that they are ready for release"
        )
    warnings += [k.what for k in table.known if (k.index, k.system) == (index.id, facts.system) and gpu.gfx in k.gfx]
    warnings += [table.wsl] * facts.is_wsl
    oldest = table.oldest_drm.get(index.rocm)
    drm = facts.linux.drm_version if facts.linux is not None else None
    found = re.match(r"(\d+)\.(\d+)", drm or "")
    if oldest is not None and found is not None and (int(found[1]), int(found[2])) < oldest:
        wanted = ".".join(map(str, oldest))
        warnings.append(
            f"ROCm {index.rocm} requires interface {wanted} of the amdgpu driver, but this kernel has {drm}. If no GPU "
            "is found after the installation, install a newer kernel"
        )
    return replace(choice, warnings=tuple(warnings))


def _no_wheel(gpu: Gpu, why: str) -> MachineError:
    fix = f"Use another GPU; or set {INDEX_VARIABLE}=cpu and run this again for a torch that uses only the CPU."
    return MachineError("no-wheel", f"No torch for {named(gpu)}: {why.rstrip('.')}.", fix=fix)


def _as_asked(facts: HostFacts, use: _Use, asked: str, place: str) -> WheelChoice:
    """Return the choice made by the user's two variables. Objections to their values become warnings.

    asked: value of LORA_ROCM_TORCH.
    place: value of LORA_ROCM_TORCH_INDEX, which is an index's id or an address.
    """
    of_url = (each for each in indexes().values() if each.url and each.url.rstrip("/") == place.rstrip("/"))
    known = indexes().get(place) or next(of_url, None)
    if asked and not re.fullmatch(r"torch(?![\w.-])[\w .,:=<>!~+*@/\[\]-]*", asked):
        what = f"The value of {TORCH_VARIABLE} is not a valid requirement for torch."
        raise UserError("torch-variable", what, where=asked, fix=f"For example: {TORCH_VARIABLE}=torch==2.13.0")
    if place and known is None and not re.fullmatch(r"\w+://[\w.,:=~+*@/%?#\[\]-]+", place):
        what = f"The value of {INDEX_VARIABLE} is neither an address nor one of: {', '.join(indexes())}."
        raise UserError("torch-index-variable", what, where=place, fix=f"For example: {INDEX_VARIABLE}=amd")
    gpu = use.gpu if use.gpu is not None and use.gpu.vendor == "amd" else None
    gfx = gpu.gfx if gpu is not None else None
    requirement = asked or (known.torch.format(gfx=gfx or "all") if known is not None else ANY_TORCH)
    url = known.url if known is not None else place or None
    kind = known.kind if known is not None else _leads_to(requirement, url, facts.system)
    warnings = _against(facts, use, known, requirement, kind)
    variables = " and ".join(name for name, value in ((TORCH_VARIABLE, asked), (INDEX_VARIABLE, place)) if value)
    why = f"as requested by {variables}."
    sure = kind if url is not None or known is not None else None
    made = WheelChoice(requirement, url, why, sure, gfx if kind == "rocm" else None, warnings, by_user=True)
    return _warned(facts, gpu, known, made) if gpu is not None and known is not None and kind == "rocm" else made


def _leads_to(requirement: str, url: str | None, system: System) -> Kind | None:
    for row in wheel_table().leads_to:
        if re.search(row.pattern, f"{requirement} {url or ''}"):
            return row.kind
    if url is not None:
        return None
    return "cuda" if system == "linux" else "cpu"  # builds in the default index


def _against(facts: HostFacts, use: _Use, known: Index | None, requirement: str, kind: Kind | None) -> tuple[str, ...]:
    warnings = []
    if known is not None and facts.system not in known.systems:
        warnings.append(f"{known.what}: there are none for {facts.system.capitalize()}")
    if known is not None and "{gfx}" in known.torch and "[" not in requirement:
        warnings.append(
            f"without an extra for the GPU, this torch has no GPU kernels. Use {known.torch.format(gfx='gfx...')}"
        )
    if kind is not None and use.kind != "cpu" and use.gpu is not None and kind != use.kind:
        is_for = "the CPU alone" if kind == "cpu" else {"cuda": "NVIDIA", "rocm": "AMD"}[kind]
        warnings.append(
            f"{named(use.gpu) if use.kind == 'rocm' else use.gpu.name} will not be used: this torch is for {is_for}"
        )
    return tuple(warnings)


def mismatch(torch: Torch, choice: WheelChoice) -> str | None:
    """Return the reason why an installed torch does not match the choice, or None if it matches.

    The reason is the end of a sentence.
    """
    built = f"ROCm {torch.rocm_version}" if torch.hip else f"CUDA {torch.cuda}" if torch.cuda else "the CPU alone"
    if choice.kind == "rocm" and torch.hip is None:
        return f"it is built for {built} and cannot use the AMD GPU"
    if choice.kind == "cuda" and torch.cuda is None:
        return f"it is built for {built} and cannot use the NVIDIA GPU"
    lacks = torch.arch_list == () or has_kernels(torch.arch_list, choice.gfx) is False
    if choice.kind == "rocm" and lacks and makeshift(torch, choice) is None:
        return f"it has no kernels for {choice.gfx}, only for {', '.join(torch.arch_list or ()) or 'no GPU at all'}"
    return None


def lacking_packages(release: str, gfx: str, installed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the kernel packages for an architecture that are missing, or do not match AMD's multi-arch torch.

    Each text has the required and the installed version.

    release: version of torch ("2.14.0+rocm10.1.0").
    installed: versions of all installed packages by name ("rocm-sdk-device-gfx1201").
    """
    rocm = release.partition("+rocm")[2]
    wanted = {f"amd-torch-device-{gfx}": release, f"rocm-sdk-device-{gfx}": rocm or installed.get("rocm", "")}
    found = ((name, version, installed.get(name)) for name, version in wanted.items() if version)
    return tuple(f"{name} {wants} ({has or 'none'} is installed)" for name, wants, has in found if has != wants)


def makeshift(torch: Torch, choice: WheelChoice) -> str | None:
    """Return the reason why an installed torch works only with restrictions, as the end of a sentence, or None."""
    if choice.for_wsl and torch.is_pytorch_org_rocm:
        return "it is a wheel from download.pytorch.org, which may abort under WSL (unsloth#11212)"
    if choice.override is None or torch.hip is None or has_kernels(torch.arch_list, choice.gfx) is not False:
        return None
    pretended = "gfx" + choice.override.replace(".", "")
    if not has_kernels(torch.arch_list, pretended):
        return None
    return (
        f"it has no kernels for {choice.gfx} and needs HSA_OVERRIDE_GFX_VERSION={choice.override}, which lora-rocm sets"
    )


def is_newer_than_run(torch: Torch) -> bool:
    """Whether this torch is newer than any with which lora-rocm was tested. Patch versions do not count."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) > NEWEST_TORCH
