"""Interprets lines of the kernel log about the GPU (``kernel_log.toml``), and reads the lines since a point in time."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.foundation.tables import read_rows
from lora_rocm.hardware.probe.sources import run_tool, tool_lines
from lora_rocm.rules.rule import Level


@dataclass(frozen=True)
class LogPattern:
    """A pattern of log lines, with its meaning and remedy. A line belongs to the first pattern that it matches.

    on_strix_halo: additional line of the remedy on that GPU; empty if there is none.
    """

    id: str
    regex: str
    level: Level
    title: str
    effect: str
    cure: tuple[str, ...]
    source: str
    on_strix_halo: str = ""


@cache
def patterns() -> tuple[LogPattern, ...]:
    """Return the patterns in the order in which they are tried. Errors are as in ``read_rows``."""
    return read_rows(Path(__file__).with_name("kernel_log.toml"), LogPattern)


def pattern_of(line: str) -> LogPattern | None:
    """Return the first pattern that a line of the kernel log matches, or None if the line is harmless."""
    return next((pattern for pattern in patterns() if re.search(pattern.regex, line, re.IGNORECASE)), None)


FAULT, HANG = "log-page-fault", "log-hang"
KILLED = re.compile(r"out of memory: Killed process (\d+)", re.IGNORECASE)
"""Pattern of the log line about a process that was killed because memory ran out.

It also matches a kill by a memory cgroup (mm/oom_kill.c).
"""
STAMP = re.compile(r"\[ *(\d+\.\d+)\] ")
TOOL_TIMEOUT_S = 10.0
MAX_LINES, MAX_LETTERS = 20, 300

Run = Callable[[Sequence[str], float], str]


@dataclass(frozen=True)
class ClockReading:
    """A point in time, on the wall clock and on the clock of the kernel log's time stamps, both in seconds."""

    wall_s: float
    kernel_s: float

    @classmethod
    def now(cls) -> ClockReading:
        return cls(time.time(), time.monotonic())


def lines_since(moment: ClockReading, run: Run = run_tool, system: str = sys.platform) -> tuple[str, ...]:
    """Return the newest relevant lines of the kernel log since ``moment``, or () if none can be read.

    The function runs a tool, which takes a moment.
    """
    if system != "linux":
        return ()
    journal = ["journalctl", "-k", "-b", "-o", "cat", "--no-pager", "-q", "--since", f"@{int(moment.wall_s)}"]
    lines = tool_lines(run, journal, TOOL_TIMEOUT_S)
    if not lines:  # or the journal may not be read
        lines = [line for line in tool_lines(run, ["dmesg"], TOOL_TIMEOUT_S) if _stamp(line) >= moment.kernel_s]
    wanted = [line for line in lines if KILLED.search(line) or pattern_of(line)]
    return tuple(STAMP.sub("", line.strip(), count=1)[:MAX_LETTERS] for line in wanted[-MAX_LINES:])


def _stamp(line: str) -> float:
    found = STAMP.match(line)
    return float(found.group(1)) if found else -1.0


def device_fault(lines: Sequence[str]) -> bool:
    """Whether these lines report a GPU fault or reset, except a reset after a failure of the copy engine."""
    met = {pattern.id for line in lines if (pattern := pattern_of(line)) is not None}
    return FAULT in met or (HANG in met and "log-sdma" not in met)


def killed_for_memory(lines: Sequence[str], pid: int) -> bool:
    """Whether these lines show that the kernel killed this process because memory ran out."""
    return any((found := KILLED.search(line)) and int(found.group(1)) == pid for line in lines)
