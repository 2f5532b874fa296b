"""AMD architectures: their cards, the wheels with kernels for them, their features. Data only.

Sources, unless a row says otherwise: TheRock cmake/therock_amdgpu_targets.cmake, RELEASES.md and SUPPORTED_GPUS.md
(read 2026-08-22); pytorch .ci/docker/manywheel/build.sh (architectures of the wheels for Linux); AOTriton releases.
Nothing here was tested on a card: the project owns no AMD GPU. Triton's compiler was run without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Generation = Literal["rdna1", "rdna2", "rdna3", "rdna3.5", "rdna4", "vega", "cdna1", "cdna2", "cdna3", "cdna4"]
Wheels = Literal["release", "building", "none"]
"""State of AMD's multi-arch wheels: declared ready, only known to build, or not made."""

REVIEWED = "2026-11-21"


@dataclass(frozen=True)
class Arch:
    """One architecture.

    override: the HSA_OVERRIDE_GFX_VERSION with which a wheel without its kernels works on Linux, or None.
    """

    gfx: str
    generation: Generation
    cards: str
    integrated: bool = False
    pytorch_org: bool = False
    """The wheels of download.pytorch.org have kernels for it (Linux only)."""
    amd_linux: Wheels = "release"
    amd_windows: Wheels = "release"
    override: str | None = None
    bf16: bool = True
    """Native bfloat16. RDNA 1 and 2 and Vega emulate it (ComfyUI comfy/model_management.py)."""
    aotriton: bool = False
    """PyTorch has fused attention for it."""
    reported: str = ""
    """Reports of others, with their source; empty if none was found."""

    @property
    def is_cdna(self) -> bool:
        return self.generation.startswith("cdna")


ARCHS: tuple[Arch, ...] = (
    Arch(
        "gfx906",
        "vega",
        "Radeon VII, Instinct MI50",
        amd_linux="building",
        amd_windows="building",
        bf16=False,
        reported="last good wheel: rocm6.3 (unsloth)",
    ),
    Arch("gfx908", "cdna1", "Instinct MI100", pytorch_org=True, amd_linux="building", amd_windows="none"),
    Arch(
        "gfx90a",
        "cdna2",
        "Instinct MI210, MI250",
        pytorch_org=True,
        amd_linux="building",
        amd_windows="none",
        aotriton=True,
    ),
    Arch("gfx942", "cdna3", "Instinct MI300X, MI300A, MI325X", pytorch_org=True, amd_windows="none", aotriton=True),
    Arch(
        "gfx950",
        "cdna4",
        "Instinct MI350X, MI355X",
        pytorch_org=True,
        amd_linux="building",
        amd_windows="none",
        aotriton=True,
    ),
    Arch(
        "gfx1010",
        "rdna1",
        "RX 5600 XT, RX 5700, RX 5700 XT",
        bf16=False,
        reported="override 10.3.0 crashes with torch 2.0 and newer (pytorch#106728, ROCm#2527)",
    ),
    Arch("gfx1011", "rdna1", "Pro V520", bf16=False),
    Arch("gfx1012", "rdna1", "RX 5500, RX 5500 XT", bf16=False),
    Arch(
        "gfx1030",
        "rdna2",
        "RX 6800, RX 6800 XT, RX 6900 XT, RX 6950 XT",
        pytorch_org=True,
        bf16=False,
        reported="MIOpen's exhaustive search crashes it (unsloth#11636); never asked for here",
    ),
    Arch("gfx1031", "rdna2", "RX 6700 XT, RX 6750 XT", override="10.3.0", bf16=False),
    Arch("gfx1032", "rdna2", "RX 6600, RX 6600 XT, RX 6650 XT", override="10.3.0", bf16=False),
    Arch("gfx1033", "rdna2", "Van Gogh (Steam Deck)", integrated=True, override="10.3.0", bf16=False),
    Arch("gfx1034", "rdna2", "RX 6400, RX 6500 XT", override="10.3.0", bf16=False),
    Arch("gfx1035", "rdna2", "Radeon 680M", integrated=True, override="10.3.0", bf16=False),
    Arch(
        "gfx1036",
        "rdna2",
        "graphics of Ryzen 7000 and 9000 desktop processors",
        integrated=True,
        override="10.3.0",
        bf16=False,
    ),
    Arch(
        "gfx1100",
        "rdna3",
        "RX 7900 XTX, RX 7900 XT, RX 7900 GRE, Pro W7900, W7800",
        pytorch_org=True,
        aotriton=True,
        reported="copies fault with Linux 6.18 to 7.0 (ROCm/amdgpu#225, #204)",
    ),
    Arch("gfx1101", "rdna3", "RX 7700 XT, RX 7800 XT, Pro W7700", pytorch_org=True, aotriton=True),
    Arch(
        "gfx1102",
        "rdna3",
        "RX 7600, RX 7600 XT",
        pytorch_org=True,
        aotriton=True,
        reported="hipBLASLt, off here, refuses products on Windows (TheRock#2847)",
    ),
    Arch("gfx1103", "rdna3", "Radeon 780M, 760M, 740M", integrated=True, pytorch_org=True, aotriton=True),
    Arch(
        "gfx1150",
        "rdna3.5",
        "Radeon 890M, 880M (Strix Point)",
        integrated=True,
        pytorch_org=True,
        aotriton=True,
        reported="AMD's own LoRA example names it (amd/playbooks pytorch-finetuning); override 11.5.1 ends in invalid "
        "device function (likelovewant/ROCmLibs#37)",
    ),
    Arch(
        "gfx1151",
        "rdna3.5",
        "Radeon 8060S, 8050S, 8040S (Strix Halo)",
        integrated=True,
        pytorch_org=True,
        aotriton=True,
        reported="AMD's own LoRA example runs on it, Windows and Linux (amd/playbooks pytorch-finetuning)",
    ),
    Arch(
        "gfx1152",
        "rdna3.5",
        "Radeon 860M, 840M (Krackan)",
        integrated=True,
        aotriton=True,
        reported="AMD's own LoRA example names it (amd/playbooks pytorch-finetuning)",
    ),
    Arch(
        "gfx1153",
        "rdna3.5",
        "Radeon 820M",
        integrated=True,
        amd_linux="building",
        amd_windows="none",
        aotriton=True,
        reported="crashes on Windows (rocm-systems#4578)",
    ),
    Arch(
        "gfx1200",
        "rdna4",
        "RX 9060, RX 9060 XT",
        pytorch_org=True,
        amd_windows="building",
        aotriton=True,
        reported="LoRA steps fault in hipBLASLt, off here (rocm-libraries#7992, #11714)",
    ),
    Arch(
        "gfx1201",
        "rdna4",
        "RX 9070, RX 9070 XT, Radeon AI PRO R9700",
        pytorch_org=True,
        amd_windows="building",
        aotriton=True,
        reported="LoRA steps fault in hipBLASLt, off here (ROCm#6647, rocm-libraries#7992)",
    ),
)

BY_GFX = {arch.gfx: arch for arch in ARCHS}
NO_RCCL = ("gfx1103", "gfx1150", "gfx1152", "gfx1153")
"""Architectures without RCCL, which training on several GPUs needs. On Windows no architecture has it (TheRock#150)."""


def arch_of(gfx: str | None) -> Arch | None:
    """The row of an architecture; None if the table lacks it."""
    return BY_GFX.get(gfx) if gfx else None


GENERIC: dict[str, tuple[str, ...]] = {
    "gfx9-generic": ("gfx906",),
    "gfx9-4-generic": ("gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx1010", "gfx1011", "gfx1012"),
    "gfx10-3-generic": ("gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036"),
    "gfx11-generic": ("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}
"""Targets whose kernels run on several architectures (https://llvm.org/docs/AMDGPUUsage.html, generic processors)."""


@dataclass(frozen=True)
class TritonSeries:
    """A minor version of Triton, and the architectures that its compiler refuses."""

    version: tuple[int, int]
    refused: tuple[str, ...]


OLD_VEGA = ("gfx900", "gfx902")
RDNA_1_AND_2 = tuple(arch.gfx for arch in ARCHS if arch.generation in ("rdna1", "rdna2"))
TRITON: tuple[TritonSeries, ...] = (
    TritonSeries((3, 6), (*OLD_VEGA, "gfx906")),
    TritonSeries((3, 7), (*OLD_VEGA, "gfx906")),
    TritonSeries((3, 8), OLD_VEGA),
    TritonSeries((3, 9), (*OLD_VEGA, *RDNA_1_AND_2)),
)
"""Tested: every kernel of this program, compiled for every architecture of the table by the wheels 3.6.0, 3.7.0, 3.8.0
and
3.9.0 of the package index (``unsupported target``). tests/kernels/test_triton.py repeats it.
"""
TRITON_PACKAGES = ("triton", "triton_rocm", "pytorch_triton_rocm", "triton_windows")
"""Package names of Triton in the wheels of torch."""


def triton_takes(version: Sequence[int], gfx: str | None) -> bool | None:
    """Whether a Triton version ((3, 9, 0)) compiles for an architecture; None if unknown."""
    series = next((series for series in TRITON if series.version == tuple(version[:2])), None)
    if series is None or gfx is None:
        return None
    if gfx in series.refused:
        return False
    return True if gfx in BY_GFX else None


def triton_versions(gfx: str) -> str:
    """The minor versions of Triton that compile for an architecture, as text: "3.6 to 3.8"."""
    taking = [".".join(map(str, series.version)) for series in TRITON if gfx not in series.refused]
    return taking[0] if len(taking) == 1 else f"{taking[0]} to {taking[-1]}" if taking else "none"


def has_kernels(arch_list: Sequence[str] | None, gfx: str | None) -> bool | None:
    """Whether a torch with kernels for ``arch_list`` has some for ``gfx``, generic ones included; None if unknown."""
    if not arch_list or gfx is None:
        return None
    return any(arch == gfx or gfx in GENERIC.get(arch, ()) for arch in arch_list)
