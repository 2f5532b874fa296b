"""Findings from this boot's kernel log about the GPU."""

from __future__ import annotations

from functools import partial

from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.rules.amd_rules import STRIX_HALO
from lora_rocm.rules.environment import EnvPlan
from lora_rocm.rules.kernel_log import Pattern, pattern_of, patterns
from lora_rocm.rules.rule import Situation


def _check(pattern: Pattern, situation: Situation, plan: EnvPlan) -> Finding | None:
    linux = situation.facts.linux
    lines = linux.kernel_log if linux is not None and situation.gpu is not None else None
    found = [line for line in lines or () if pattern_of(line) is pattern]
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


LOG_CHECKS: dict[str, Check] = {pattern.id: partial(_check, pattern) for pattern in patterns()}
