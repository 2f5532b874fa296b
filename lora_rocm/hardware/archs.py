"""AMD GPU architectures from ``archs.toml``: their cards, their features, and the wheels with kernels for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_rocm.foundation.tables import read_table

Generation = Literal["rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4", "vega", "cdna1", "cdna2", "cdna3", "cdna4"]
Wheels = Literal["release", "building", "none"]
"""State of AMD's multi-arch wheels: declared ready for release, only known to build, or not built."""


@dataclass(frozen=True)
class Arch:
    """One GPU architecture.

    override: HSA_OVERRIDE_GFX_VERSION for wheels that lack kernels for this architecture (Linux), or None if no value
        helps.
    """

    gfx: str
    generation: Generation
    cards: str
    integrated: bool = False
    pytorch_org: bool = False
    """Whether the wheels of download.pytorch.org have kernels for this architecture (Linux only)."""
    amd_linux: Wheels = "release"
    amd_windows: Wheels = "release"
    windows_ready_from: tuple[int, ...] = ()
    """First ROCm version with Windows wheels that AMD lists as ready, if ``amd_windows`` is "building" for older
    versions. It is () if there is none.
    """
    override: str | None = None
    bf16: bool = True
    """Whether the GPU computes bfloat16 natively. RDNA 1, RDNA 2 and Vega emulate it (ComfyUI
    comfy/model_management.py).
    """
    aotriton: bool = False
    """Whether PyTorch has fused attention for this architecture."""
    reported: str = ""
    """Users' reports about this architecture, with their source; empty if none was found."""

    @property
    def is_cdna(self) -> bool:
        return self.generation.startswith("cdna")

    def wheels(self, system: str, rocm: str | None) -> Wheels:
        """Return the state of AMD's wheels for an operating system.

        rocm: ROCm version of the wheels ("10.1"). Without a number (None, "nightly"), wheels that are ready only in a
            later ROCm count as building.
        """
        state, ready = (self.amd_windows, self.windows_ready_from) if system == "windows" else (self.amd_linux, ())
        numbers = tuple(int(number) for number in re.findall(r"\d+", rocm or ""))
        return "release" if state == "building" and ready and numbers >= ready else state


@dataclass(frozen=True)
class TritonSeries:
    """A minor version of Triton, and the architectures that its compiler rejects."""

    version: tuple[int, int]
    refused: tuple[str, ...]


@dataclass(frozen=True)
class ArchTable:
    """Contents of ``archs.toml``.

    generic: for each generic target, the architectures that can run its kernels.
    no_rccl: architectures without RCCL, the library that training on several GPUs needs.
    triton_packages: names under which torch's wheels install Triton.
    """

    arch: tuple[Arch, ...]
    triton: tuple[TritonSeries, ...]
    generic: Mapping[str, tuple[str, ...]]
    no_rccl: tuple[str, ...]
    triton_packages: tuple[str, ...]


_TABLE = read_table(Path(__file__).with_name("archs.toml"), ArchTable)
ARCHS, TRITON, GENERIC = _TABLE.arch, _TABLE.triton, _TABLE.generic
NO_RCCL, TRITON_PACKAGES = _TABLE.no_rccl, _TABLE.triton_packages
BY_GFX = {arch.gfx: arch for arch in ARCHS}


def arch_of(gfx: str | None) -> Arch | None:
    """Return the table row of an architecture, or None if the table lacks it."""
    return BY_GFX.get(gfx) if gfx else None


def triton_of(libraries: Mapping[str, str]) -> tuple[str, str] | None:
    """Return package name and version of the installed Triton, or None if there is none.

    libraries: versions of all installed packages by name.
    """
    found = {name.lower().replace("-", "_"): version for name, version in libraries.items()}
    return next(((name, found[name]) for name in TRITON_PACKAGES if name in found), None)


def triton_takes(version: str, gfx: str) -> bool | None:
    """Whether a version of Triton ("3.9.0") can compile for an architecture; None if unknown."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    series = next((series for series in TRITON if series.version == numbers), None)
    if series is None or (gfx not in BY_GFX and gfx not in series.refused):
        return None
    return gfx not in series.refused


def triton_versions(gfx: str) -> str:
    """Return the minor versions of Triton that compile for an architecture, as text: "3.6 to 3.8", or "none"."""
    taking = [".".join(map(str, series.version)) for series in TRITON if gfx not in series.refused]
    return taking[0] if len(taking) == 1 else f"{taking[0]} to {taking[-1]}" if taking else "none"


def triton_refusal(version: str, gfx: str) -> str | None:
    """Return a text for the user if this version of Triton cannot compile for the architecture, else None.

    The text is a sentence without a final period.
    """
    if triton_takes(version, gfx) is not False:
        return None
    taking = triton_versions(gfx)
    others = "no known version can" if taking == "none" else f"Triton {taking} can"
    return f"Triton {version} cannot compile for this GPU ({gfx}); {others}"


def has_kernels(arch_list: Sequence[str] | None, gfx: str | None) -> bool | None:
    """Whether a torch that was built for ``arch_list`` has kernels that run on ``gfx``; None if unknown.

    Kernels of a generic target count for each architecture that can run them.
    """
    if not arch_list or gfx is None:
        return None
    return any(arch == gfx or gfx in GENERIC.get(arch, ()) for arch in arch_list)
