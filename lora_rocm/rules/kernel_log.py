"""Interprets lines of the kernel log about the GPU (pattern, meaning, remedy), and reads those since a moment."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_rocm.hardware.probe.sources import run_tool
from lora_rocm.rules.rule import Level

SELF_TEST = "lora-rocm doctor"
RESUME = "lora-rocm train RECIPE --resume latest"
NEEDED = r"amdgpu/(?:\w+_(?:pfp|me|mec|rlc|imu|sos|sdma|smc)|sdma_\w+|smu_\w+)\.bin"
"""Firmware that a GPU needs to compute. Other firmware (camera, video) may be missing on a healthy machine."""


@dataclass(frozen=True)
class Pattern:
    """A pattern of log lines with its meaning and remedy. A line counts for the first pattern that it matches."""

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
    """The first pattern that a line of the kernel log matches; None if the line is harmless."""
    return next((pattern for pattern in PATTERNS if re.search(pattern.regex, line, re.IGNORECASE)), None)


FAULT, HANG = "log-page-fault", "log-hang"
KILLED = re.compile(r"out of memory: Killed process (\d+)", re.IGNORECASE)
"""Also matches kills of a memory cgroup (mm/oom_kill.c)."""
STAMP = re.compile(r"\[ *(\d+\.\d+)\] ")
TOOL_TIMEOUT_S = 10.0
MAX_LINES, MAX_LETTERS = 20, 300

Run = Callable[[Sequence[str], float], str]


@dataclass(frozen=True)
class Moment:
    """A point in time on the wall clock and on the clock of the kernel's line stamps."""

    wall_s: float
    kernel_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.time(), time.monotonic())


def lines_since(moment: Moment, run: Run = run_tool, system: str = sys.platform) -> tuple[str, ...]:
    """The newest relevant lines since then; empty if there are none or this user may not read them.

    It runs a tool, which takes a moment.
    """
    if system != "linux":
        return ()
    since = f"@{int(moment.wall_s)}"
    lines = _lines(run, ["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q", "--since", since])
    if not lines:  # or the journal may not be read
        lines = [line for line in _lines(run, ["dmesg"]) if _stamp(line) >= moment.kernel_s]
    wanted = [line for line in lines if KILLED.search(line) or pattern_of(line)]
    return tuple(STAMP.sub("", line.strip(), count=1)[:MAX_LETTERS] for line in wanted[-MAX_LINES:])


def _lines(run: Run, command: list[str]) -> list[str]:
    try:
        return run(command, TOOL_TIMEOUT_S).splitlines()
    except OSError:
        return []


def _stamp(line: str) -> float:
    found = STAMP.match(line)
    return float(found.group(1)) if found else -1.0


def device_fault(lines: Sequence[str]) -> bool:
    """Whether the GPU reported a fault or was reset, unless its copy engine failed."""
    met = {pattern.id for line in lines if (pattern := pattern_of(line)) is not None}
    return FAULT in met or (HANG in met and "log-sdma" not in met)


def killed_for_memory(lines: Sequence[str], pid: int) -> bool:
    """Whether the kernel killed this process because memory ran out."""
    return any((found := KILLED.search(line)) and int(found.group(1)) == pid for line in lines)
