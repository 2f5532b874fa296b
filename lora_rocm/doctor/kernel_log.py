"""What the kernel log of this boot says about the GPU: a pattern, its meaning, its cure. Data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from lora_rocm.doctor.finding import Check, Finding
from lora_rocm.host.environ import EnvPlan
from lora_rocm.host.quirks import Level, Situation

SELF_TEST = "lora-rocm doctor"
RESUME = "lora-rocm train RECIPE --resume latest"
NEEDED = r"amdgpu/(?:\w+_(?:pfp|me|mec|rlc|imu|sos|sdma|smc)|sdma_\w+|smu_\w+)\.bin"
"""Firmware without which a GPU does not compute; others (camera, video) may be missing from a sound machine."""


@dataclass(frozen=True)
class Pattern:
    """A line of the log. One line counts for the first pattern that it matches."""

    id: str
    regex: str
    level: Level
    title: str
    effect: str
    cure: tuple[str, ...]
    source: str


PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "log-no-firmware",
        rf"direct firmware load for {NEEDED} failed|failed to load.* firmware \"?{NEEDED}",
        "breaks",
        "The driver found no firmware for the GPU",
        "the GPU, or its engine for computing or copying, does not start",
        ("Install the newest linux-firmware of your distribution, then restart.",),
        "linux-firmware amdgpu",
    ),
    Pattern(
        "log-no-atomics",
        r"(?:amdgpu|kfd).*(?:PCI ?(?:E|Express) atomic|PCI rejects atomics)",
        "harms",
        "The driver says that the slot has no PCIe atomics",
        "the GPU may be skipped for computing",
        ("Move the card to a slot that is wired to the processor (usually the first), without a riser or adapter.",),
        "ROCm installation guide, PCIe atomics",
    ),
    Pattern(
        "log-resume-failed",
        r"failed to resume kfd",
        "breaks",
        "The compute driver did not come back after suspend",
        "the GPU is gone until the next start of the machine",
        ("systemctl reboot", "Do not suspend the machine while a run goes on."),
        "Linux drivers/gpu/drm/amd/amdgpu/amdgpu_amdkfd.c",
    ),
    Pattern(
        "log-page-fault",
        r"\[gfxhub\d?\] .*page fault|\bGCVM_L2_PROTECTION_FAULT_STATUS|\bVM_L2_PROTECTION_FAULT",
        "harms",
        "A program on the GPU touched memory that is not its own",
        "that program's run died; with training it is a wrong kernel (BLAS, attention) or kernels of another GPU",
        (SELF_TEST, f"A run goes on at its last checkpoint: {RESUME}"),
        "ROCm#6413, #6600, #6647; rocm-libraries#7992",
    ),
    Pattern(
        "log-sdma",
        r"\bsdma\d*\b.*(?:timeout|fault|hang|fail)|(?:timeout|fault|hang)\w*\b.*\bsdma",
        "harms",
        "The GPU's copy engine (SDMA) failed",
        "copies hung, and the driver had to reset the GPU",
        ("export HSA_ENABLE_SDMA=0", "Slower, but copies are then done without that engine."),
        "ROCm/amdgpu#225, #204",
    ),
    Pattern(
        "log-hang",
        r"\bring \S+ timeout|\bMES(?:\(\d\))? failed to respond|GPU reset|device wedged|job.timedout",
        "harms",
        "The GPU hung and was reset",
        "every program that used the GPU lost its state; a run goes on at its last checkpoint",
        (SELF_TEST, f"To go on: {RESUME}"),
        "ROCm#5724, #5997",
    ),
    Pattern(
        "log-userptr",
        r"(?:restore_userptr_worker|svm_range_(?:deferred_list|restore)_work).*hogged CPU",
        "harms",
        "The driver is busy with moving page-locked memory",
        "a hint of runs that freeze: memory that the GPU uses changes its place again and again",
        ("Add to the recipe: runtime: {workers: 0, pin_memory: 'no'}",),
        "ROCm#5997",
    ),
)


def pattern_of(line: str) -> Pattern | None:
    """What a line of the kernel log means; None where it means nothing bad."""
    return next((pattern for pattern in PATTERNS if re.search(pattern.regex, line, re.IGNORECASE)), None)


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
    return Finding(pattern.id, pattern.level, pattern.title, evidence, effect, cure, pattern.source)


LOG_CHECKS: dict[str, Check] = {pattern.id: partial(_check, pattern) for pattern in PATTERNS}
