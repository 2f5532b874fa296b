"""The table of checks, and what they say about a machine, the most harmful first."""

from __future__ import annotations

from dataclasses import replace

from lora_rocm.doctor.choices import CHOICE_CHECKS, NOTES
from lora_rocm.doctor.finding import LEVELS, Check, Finding
from lora_rocm.doctor.kernel_log_checks import LOG_CHECKS
from lora_rocm.doctor.known_bad import KNOWN_BAD_CHECKS
from lora_rocm.doctor.linux_checks import LINUX_CHECKS
from lora_rocm.doctor.memory_checks import MEMORY_CHECKS
from lora_rocm.doctor.mitigations_seen import REMEMBERED_CHECKS
from lora_rocm.doctor.selftest_checks import TESTED_CHECKS
from lora_rocm.doctor.software_checks import SOFTWARE_CHECKS
from lora_rocm.doctor.windows_checks import WINDOWS_CHECKS
from lora_rocm.errors import LoraRocmError
from lora_rocm.hardware import wheels
from lora_rocm.hardware.gpu_select import Selection, select
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.rule import Situation

# Inside a level findings come in this order: what the rest stands on first.
CHECKS: dict[str, Check] = {
    **LINUX_CHECKS,
    **SOFTWARE_CHECKS,
    **WINDOWS_CHECKS,
    **CHOICE_CHECKS,
    **TESTED_CHECKS,
    **KNOWN_BAD_CHECKS,
    **LOG_CHECKS,
    **MEMORY_CHECKS,
    **REMEMBERED_CHECKS,
    **NOTES,
}


def findings(situation: Situation, plan: EnvPlan) -> tuple[Finding, ...]:
    """What the checks say, in order of harm."""
    seen = as_intended(situation)
    found = [finding for check in CHECKS.values() if (finding := check(seen, plan)) is not None]
    return tuple(finding for level in LEVELS for finding in found if finding.level == level)


def as_intended(situation: Situation) -> Situation:
    """With the GPU selected that this machine's training should use, whatever torch is there now.

    A CUDA torch hides the AMD GPU that it cannot use from ``select``; and where another vendor's card or the CPU does
    the work, what holds for an AMD GPU beside it does not matter.
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
