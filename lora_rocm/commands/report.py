"""``lora-rocm report``: the report of a run, and its measured speed as a line for a public table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_rocm.report.measured_line import MeasuredLine, measured_line, measured_text
from lora_rocm.report.report import write_report
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_view import RunView


@dataclass(frozen=True)
class ReportResult:
    """Result of ``lora-rocm report``.

    Attributes:
        report: the written page.
        speed: the measured speed as a line for a public table, or null without --speed-line.
    """

    report: Path
    speed: MeasuredLine | None = None


def report(run_dir: RunDir, *, speed_line: bool = False) -> ReportResult:
    """Write the report of a run.

    Args:
        run_dir: the run directory.
        speed_line: whether to return the line for a public table, too. It is computed first.

    Raises:
        LoraRocmError: the report cannot be written, or the run has no such line.
    """
    speed = measured_line(RunView.of(run_dir)) if speed_line else None
    return ReportResult(write_report(run_dir), speed)


def render(result: ReportResult) -> str:
    """Return the path of the page, or else the line with its header."""
    return str(result.report) if result.speed is None else measured_text(result.speed)
