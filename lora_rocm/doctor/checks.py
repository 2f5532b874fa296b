"""The table of all checks, and the function that runs them on a machine."""

from __future__ import annotations

from dataclasses import replace

from lora_rocm.doctor.choices import CHOICE_CHECKS, NOTES
from lora_rocm.doctor.finding import LEVELS, Check, Finding
from lora_rocm.doctor.known_bad import KNOWN_BAD_CHECKS
from lora_rocm.doctor.linux_checks import LINUX_CHECKS
from lora_rocm.doctor.memory_checks import MEMORY_CHECKS
from lora_rocm.doctor.selftest_checks import TESTED_CHECKS
from lora_rocm.doctor.software_checks import SOFTWARE_CHECKS
from lora_rocm.doctor.table_age import AGE_CHECKS
from lora_rocm.doctor.windows_checks import WINDOWS_CHECKS
from lora_rocm.errors import LoraRocmError
from lora_rocm.hardware import wheels
from lora_rocm.hardware.gpu_select import Selection, select
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

# The order of findings within a level: foundations first.
CHECKS: dict[str, Check] = {
    **LINUX_CHECKS,
    **SOFTWARE_CHECKS,
    **WINDOWS_CHECKS,
    **CHOICE_CHECKS,
    **TESTED_CHECKS,
    **KNOWN_BAD_CHECKS,
    **MEMORY_CHECKS,
    **NOTES,
    **AGE_CHECKS,
}


def findings(situation: Situation, plan: EnvPlan) -> tuple[Finding, ...]:
    """Return the findings of all checks, ordered by severity."""
    seen = as_intended(situation)
    found = [finding for check in CHECKS.values() if (finding := check(seen, plan)) is not None]
    return tuple(finding for level in LEVELS for finding in found if finding.level == level)


def as_intended(situation: Situation) -> Situation:
    """Return the situation with the GPU that training on this machine should use, independent of the installed torch.

    Without this, a CUDA torch would hide an unusable AMD GPU from ``select``. If another vendor's GPU or the CPU should
    be used, no GPU is selected, because findings about an AMD GPU do not matter.
    """
    facts, environ = situation.facts, situation.environ
    try:
        kind = wheels.choose(facts, environ).kind
    except LoraRocmError:
        kind = "rocm" if facts.amd_gpus else None
    selection = Selection(None)
    if kind in ("rocm", None):
        selection = select(replace(facts, torch=None), environ)
    return replace(situation, selection=selection)
