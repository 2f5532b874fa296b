"""Checks for drivers, kernels and firmware that are known to be bad, by version (``known_bad.toml``) or kernel log."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lora_rocm.doctor.cures import install_torch, newer_firmware, newer_kernel, newest_rocm
from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.foundation.tables import by_name, read_table
from lora_rocm.hardware.attention_images import attention_fits, attention_misfit
from lora_rocm.rules.amd_rules import STRIX_HALO
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.kernel_log import LogPattern, pattern_of, patterns
from lora_rocm.rules.rule import Level, Situation, When, release

Read = Callable[[Situation], str | None]
Cure = Callable[[Situation, str], tuple[str, ...]]


@dataclass(frozen=True)
class Bad:
    """A range of bad versions: ``low`` <= version < ``below``.

    For each ``subject``, only the first matching row is reported.

    good: version to install, or line to type.
    eased_by: name of a planned variable that mitigates the fault.
    not_on: distributions with their version ("ubuntu 26.04") on which these versions are not bad.
    """

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
    good: str = ""
    distributions: tuple[str, ...] = ()
    eased_by: str = ""
    not_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadTable:
    """Contents of ``known_bad.toml``.

    where: evidence for each subject, with placeholders for facts about the machine.
    """

    where: Mapping[str, str]
    bad: tuple[Bad, ...]


def kernel(situation: Situation) -> str | None:
    """Return the kernel version (``uname -r``), or None if the system is not Linux."""
    return situation.facts.linux.kernel if situation.facts.linux else None


def _drm(situation: Situation) -> str | None:
    return situation.facts.linux.drm_version if situation.facts.linux else None


def _firmware_date(situation: Situation) -> str | None:
    package = situation.facts.linux.firmware_package if situation.facts.linux else None
    found = re.search(r"20\d{6}", package or "")
    return found.group() if found else None


def _mes(situation: Situation) -> str | None:
    """Return the version of the GPU's scheduler firmware as a decimal number. It is usually written as "0x83"."""
    text = situation.gpu.mes_firmware if situation.gpu else None
    return str(int(text, 16)) if text and re.fullmatch(r"(0x)?[0-9a-fA-F]+", text) else None


def _adrenalin(situation: Situation) -> str | None:
    return situation.gpu.driver_product if situation.gpu else None


def _kernel_of_unread_drm(situation: Situation) -> str | None:
    """Return the kernel version if it determines the version of amdgpu's interface, else None.

    This is the case if the kernel log does not contain the interface version and no separate amdgpu module is loaded.
    """
    linux = situation.facts.linux
    own = linux is not None and linux.drm_version is None and linux.amdgpu_version is None
    return kernel(situation) if own else None


def _rocm(situation: Situation) -> str | None:
    return situation.facts.torch.rocm_version if situation.facts.torch is not None else None


def _rocm_of_unproven_attention(situation: Situation) -> str | None:
    """Return the ROCm version, or None if the attention library's own files show whether attention works.

    The files are better evidence than the version.
    """
    facts, gfx = situation.facts, situation.gpu.gfx if situation.gpu is not None else None
    proven = attention_fits(facts.torch, gfx) or attention_misfit(facts.torch, gfx) is not None
    return None if proven else _rocm(situation)


FUNCTIONS = {
    **by_name(_adrenalin, _drm, _firmware_date, kernel, _kernel_of_unread_drm, _mes, _rocm),
    **by_name(_rocm_of_unproven_attention),
    "as_written": lambda situation, line: (line,),
    "install_torch": lambda situation, good: install_torch(situation),
    "newer_firmware": lambda situation, good: newer_firmware(situation.facts, good),
    "newest_rocm": lambda situation, good: newest_rocm(situation.facts),
    "newer_kernel": lambda situation, good: newer_kernel(situation.facts, good),
}


@cache
def bad_table() -> BadTable:
    """Return the contents of ``known_bad.toml``. Errors are as in ``read_table``."""
    return read_table(Path(__file__).with_name("known_bad.toml"), BadTable, FUNCTIONS)


def _holds(row: Bad, situation: Situation) -> bool:
    linux, version = situation.facts.linux, row.read(situation)
    return (
        version is not None
        and row.when.holds(situation)
        and (not row.distributions or (linux is not None and linux.distribution in row.distributions))
        and (linux is None or f"{linux.distribution} {linux.distribution_version}" not in row.not_on)
        and row.low <= release(version) < row.below
    )


def _check(row: Bad, situation: Situation, plan: EnvPlan) -> Finding | None:
    of_subject = (other for other in bad_table().bad if other.subject == row.subject)
    if next((other for other in of_subject if _holds(other, situation)), None) != row:
        return None
    effect = row.effect
    eased = next((planned for planned in plan.variables if planned.variable == row.eased_by), None)
    if eased is not None:
        effect += f"; lora-rocm runs with {eased.variable}={eased.value} to avoid it, which costs speed"
    cure = row.cure(situation, row.good)
    return Finding(row.id, row.level, row.title, _evidence(row, situation), effect, cure, row.source)


def _evidence(row: Bad, situation: Situation) -> str:
    facts = situation.facts
    text = bad_table().where[row.subject].format(linux=facts.linux, gpu=situation.gpu, torch=facts.torch)
    card = f"{situation.gpu.name} ({situation.gpu.gfx})" if situation.gpu is not None else ""
    return f"{text.replace('None', 'unknown').replace(' )', ')')}; {card}"


def _logged(pattern: LogPattern, situation: Situation, plan: EnvPlan) -> Finding | None:
    """Report lines of this boot's kernel log that match a pattern of GPU faults."""
    linux = situation.facts.linux
    lines = linux.kernel_log if linux is not None and situation.gpu is not None else None
    found = [line for line in lines or () if pattern_of(line) == pattern]
    if not found:
        return None
    times = "1 line" if len(found) == 1 else f"{len(found)} lines, the last"
    evidence = f"kernel log of this boot, {times}: {found[-1].strip()}"
    cure = pattern.cure
    planned = {row.variable: row.value for row in plan.variables}
    effect = pattern.effect
    if pattern.id == "log-sdma" and planned.get("HSA_ENABLE_SDMA") == "0":
        effect += "; lora-rocm sets HSA_ENABLE_SDMA=0 on this machine, so its runs do not use that engine"
        cure = ("For other programs, as long as this kernel runs: export HSA_ENABLE_SDMA=0",)
    elif pattern.on_strix_halo and situation.gpu is not None and situation.gpu.gfx == STRIX_HALO:
        cure = (*cure, pattern.on_strix_halo)
    return Finding(pattern.id, pattern.level, pattern.title, evidence, effect, cure, pattern.source)


KNOWN_BAD_CHECKS: dict[str, Check] = {
    **{row.id: partial(_check, row) for row in bad_table().bad},
    **{pattern.id: partial(_logged, pattern) for pattern in patterns()},
}
