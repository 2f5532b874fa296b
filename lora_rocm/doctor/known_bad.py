"""Known bad drivers, kernels and firmware: a table of version ranges, and the function that reads it.

The source of each row is the report it names; nothing was reproduced by this project.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lora_rocm.doctor.cures import install_torch, newer_firmware, newer_kernel
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Level, Situation, When, release

Read = Callable[[Situation], str | None]
Cure = Callable[[Situation], tuple[str, ...]]


@dataclass(frozen=True)
class Bad:
    """One range: ``low`` <= version < ``below``. Of the rows about one ``subject`` only the first match is reported."""

    id: str
    subject: str
    read: Read
    low: tuple[int, ...]
    below: tuple[int, ...]
    when: When
    level: Level
    title: str
    effect: str
    cure: Cure
    source: str
    distributions: tuple[str, ...] = ()
    eased_by: str = ""
    """A planned variable that mitigates it."""


def kernel(situation: Situation) -> str | None:
    """The kernel version (``uname -r``); None on other systems."""
    return situation.facts.linux.kernel if situation.facts.linux else None


def _drm(situation: Situation) -> str | None:
    return situation.facts.linux.drm_version if situation.facts.linux else None


def _firmware_date(situation: Situation) -> str | None:
    package = situation.facts.linux.firmware_package if situation.facts.linux else None
    found = re.search(r"20\d{6}", package or "")
    return found.group() if found else None


def _mes(situation: Situation) -> str | None:
    """The firmware's version in decimal; people write it as "0x83"."""
    text = situation.gpu.mes_firmware if situation.gpu else None
    return str(int(text, 16)) if text and re.fullmatch(r"(0x)?[0-9a-fA-F]+", text) else None


def _adrenalin(situation: Situation) -> str | None:
    return situation.gpu.driver_product if situation.gpu else None


def _kernel_of_unread_drm(situation: Situation) -> str | None:
    """The kernel version if it decides amdgpu's interface: the log lacks the latter, and no other module is loaded."""
    linux = situation.facts.linux
    own = linux is not None and linux.drm_version is None and linux.amdgpu_version is None
    return kernel(situation) if own else None


def _rocm(situation: Situation) -> str | None:
    """ROCm's version, from the wheel's version. HIP's third number is a build ("10.0.26301")."""
    torch = situation.facts.torch
    if torch is None or torch.hip is None:
        return None
    found = re.search(r"\+rocm(\d+(?:\.\d+)+)", torch.version)
    return found.group(1) if found else ".".join(map(str, release(torch.hip)[:2]))


def _adrenalin_cure(situation: Situation) -> tuple[str, ...]:
    return ("Install an Adrenalin newer than 26.7.1, or 26.3.1: https://www.amd.com/en/support/download/drivers.html",)


def _firmware_cure(situation: Situation) -> tuple[str, ...]:
    return newer_firmware(situation.facts, "Good: linux-firmware 20260110 (MES 0x80) or newer.")


def _kernel_cure(wanted: str) -> Cure:
    return lambda situation: newer_kernel(situation.facts, wanted)


def _self_test_cure(situation: Situation) -> tuple[str, ...]:
    return ("lora-rocm doctor",)


BAD: tuple[Bad, ...] = (
    Bad(
        "kernel-strix-halo-debian",
        "kernel",
        kernel,
        (6, 12),
        (6, 13),
        When(systems=("linux",), wsl=False, gfx=("gfx1151",), hip_from="7.2", hip_below="7.3"),
        "harms",
        "This Debian kernel and ROCm 7.2 do not go together on Strix Halo",
        "training is reported to fail; the driver of this kernel is older than the fixes for this GPU",
        _kernel_cure("6.18.4 or newer"),
        "ROCm#6143",
        distributions=("debian",),
    ),
    Bad(
        "kernel-strix-halo",
        "kernel",
        kernel,
        (0,),
        (6, 18, 4),
        When(systems=("linux",), wsl=False, gfx=("gfx1151",)),
        "harms",
        "The kernel is older than the fixes for Strix Halo",
        "the driver may hang or fault under load (a distribution's own kernel may have the fixes all the same)",
        _kernel_cure("6.18.4 or newer"),
        "TheRock docs/faq.md",
    ),
    Bad(
        "kernel-rdna3-sdma",
        "kernel",
        kernel,
        (6, 18),
        (7, 1),
        When(systems=("linux",), wsl=False, generations=("rdna3",)),
        "harms",
        "This kernel's copy engine (SDMA) faults with RDNA 3 cards",
        "copies to the GPU fault or hang, and the run dies",
        _kernel_cure("7.1 or newer; 6.12 and 6.17.9 are good, too"),
        "ROCm/amdgpu#225, #204",
        eased_by="HSA_ENABLE_SDMA",
    ),
    Bad(
        "kernel-gfx1030-old",
        "kernel",
        kernel,
        (5, 15),
        (5, 16),
        When(systems=("linux",), wsl=False, gfx=("gfx1030",), hip_from="6.4", hip_below="6.5"),
        "harms",
        "Kernel 5.15 with ROCm 6.4 gave NaN on copies to this card",
        "batches may arrive on the GPU as NaN; the guard stops the run",
        _kernel_cure("anything newer than 5.15"),
        "ROCm#6123",
    ),
    Bad(
        "drm-old",
        "drm",
        _drm,
        (0,),
        (3, 64),
        When(systems=("linux",), wsl=False, hip_from="7.14"),
        "harms",
        "The amdgpu driver is older than this ROCm wants",
        "allocating memory can hang for ever (hipMemSetAccess)",
        _kernel_cure("6.17 or newer (interface 3.64)"),
        "rocm-systems#9820; pytorch#192259",
    ),
    Bad(
        "drm-unread",
        "drm",
        _kernel_of_unread_drm,
        (0,),
        (6, 13),
        When(systems=("linux",), wsl=False, hip_from="7.14"),
        "harms",
        "This kernel's amdgpu driver is older than this ROCm wants",
        "allocating memory can hang for ever (hipMemSetAccess)",
        _kernel_cure("6.17 or newer (interface 3.64)"),
        "rocm-systems#9820; pytorch#192259 (seen with kernel 6.12)",
    ),
    Bad(
        "firmware-mes",
        "firmware",
        _mes,
        (0x83,),
        (0x84,),
        When(systems=("linux",), wsl=False, gfx=("gfx1151",)),
        "harms",
        "The GPU's scheduler firmware (MES) 0x83 hangs",
        "the GPU hangs in the middle of a run and is reset",
        _firmware_cure,
        "ROCm#5724",
    ),
    Bad(
        "firmware-20251125",
        "firmware",
        _firmware_date,
        (20251125,),
        (20251126,),
        When(systems=("linux",), wsl=False, gfx=("gfx1151",)),
        "harms",
        "linux-firmware 20251125 hangs Strix Halo",
        "the GPU hangs in the middle of a run and is reset",
        _firmware_cure,
        "ROCm#5724",
    ),
    Bad(
        "adrenalin-rdna4",
        "adrenalin",
        _adrenalin,
        (26, 5, 1),
        (26, 7, 2),
        When(systems=("windows",), generations=("rdna4",)),
        "slows",
        "This Adrenalin driver pages the memory of RDNA 4 cards out",
        "after about ten idle seconds the model is moved to main memory, and the next step is slow",
        _adrenalin_cure,
        "TheRock#7221",
    ),
    Bad(
        "rocm-conv",
        "rocm",
        _rocm,
        (10, 0),
        (10, 0, 1),
        When(systems=("linux",), gfx=("gfx1151",)),
        "harms",
        "Convolutions of ROCm 10.0.0 fail on Strix Halo",
        'every convolution ends in "Invalid elapsed time"; the self-test switches MIOpen off where it sees this',
        _self_test_cure,
        "MIOpen#3964",
    ),
    Bad(
        "rocm-conv-windows",
        "rocm",
        _rocm,
        (7, 1),
        (7, 3),
        When(systems=("windows",)),
        "harms",
        "Convolutions of this ROCm are known to be wrong on Windows",
        "images are encoded to garbage, NaN or zeros; the self-test switches MIOpen off where it sees this",
        install_torch,
        "rocm-libraries#3339; TheRock#2458",
    ),
    Bad(
        "rocm-batched-windows",
        "rocm",
        _rocm,
        (7, 14),
        (7, 14, 1),
        When(systems=("windows",), gfx=("gfx1151", "gfx1201")),
        "note",
        "Batched products of ROCm 7.14.0 are reported to crash on this GPU under Windows",
        "plain attention is made of them, and training would end there; the self-test tries them and says what it saw",
        _self_test_cure,
        "ROCm#6517 (gfx1151); TheRock#7403 (gfx1201)",
    ),
)


def _holds(row: Bad, situation: Situation) -> bool:
    linux, version = situation.facts.linux, row.read(situation)
    return (
        version is not None
        and row.when.holds(situation)
        and (not row.distributions or (linux is not None and linux.distribution in row.distributions))
        and row.low <= release(version) < row.below
    )


def _check(row: Bad, situation: Situation, plan: EnvPlan) -> Finding | None:
    first = next((other for other in BAD if other.subject == row.subject and _holds(other, situation)), None)
    if first is not row:
        return None
    effect = row.effect
    eased = next((planned for planned in plan.variables if planned.variable == row.eased_by), None)
    if eased is not None:
        effect += f"; lora-rocm runs with {eased.variable}={eased.value} against it, which costs speed"
    return Finding(row.id, row.level, row.title, _evidence(row, situation), effect, row.cure(situation), row.source)


WHERE = {
    "kernel": "kernel {linux.kernel} ({linux.distribution} {linux.distribution_version})",
    "drm": "interface {linux.drm_version} of the amdgpu driver, kernel {linux.kernel}, HIP {torch.hip}",
    "firmware": "MES firmware {gpu.mes_firmware}; package linux-firmware {linux.firmware_package}",
    "adrenalin": "Adrenalin {gpu.driver_product}, driver {gpu.driver}",
    "rocm": "HIP {torch.hip} of torch {torch.version}",
}


def _evidence(row: Bad, situation: Situation) -> str:
    facts = situation.facts
    text = WHERE[row.subject].format(linux=facts.linux, gpu=situation.gpu, torch=facts.torch)
    card = f"{situation.gpu.name} ({situation.gpu.gfx})" if situation.gpu is not None else ""
    return f"{text.replace('None', 'unknown').replace(' )', ')')}; {card}"


KNOWN_BAD_CHECKS: dict[str, Check] = {row.id: partial(_check, row) for row in BAD}
