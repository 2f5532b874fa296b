"""``lora-rocm doctor``: report a machine's problems and their fixes, the most harmful first.

A healthy machine, for which there are only notes, gets one line on standard output. Progress goes to standard error.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.commands.output import Notify, unheard
from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.finding import Finding
from lora_rocm.doctor.report_file import write_report
from lora_rocm.doctor.text import healthy, machine_text, report_text
from lora_rocm.errors import LoraRocmError, MachineError
from lora_rocm.hardware.facts import HostFacts, load_facts
from lora_rocm.hardware.selftest_result import path_of
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.environment import EnvPlan, EnvRow, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.supervisor.selftest_runner import self_test

JSON_FORMAT = 1
REFUSED = ("attention-images",)
"""Ids of findings that prevent a run although their level is below "breaks" (see ``rules.attention_refusal``)."""


@dataclass(frozen=True)
class DoctorResult:
    """Result of ``lora-rocm doctor``.

    Attributes:
        format: version of this document's format.
        lora_rocm: version of this program.
        machine: description of the machine.
        healthy: whether there are only notes.
        findings: the problems, the most harmful first.
        variables: environment variables that training gets.
        settings: settings of this program that training gets.
        selftest: results of the GPU self-test, or null if there are none.
        facts: recorded facts about the machine, which ``--facts`` can read.
    """

    format: int
    lora_rocm: str
    machine: str
    healthy: bool
    findings: tuple[Finding, ...]
    variables: tuple[EnvRow, ...]
    settings: tuple[EnvRow, ...]
    selftest: dict[str, Any] | None
    facts: HostFacts


@dataclass(frozen=True)
class Examined:
    """An examined machine: facts, environment plan, problems, and the day of its last self-test (empty if none)."""

    situation: Situation
    env_plan: EnvPlan
    findings: tuple[Finding, ...]
    tested_on: str

    @property
    def exit_code(self) -> int:
        """The exit code: 3 if a finding prevents training, else 0."""
        refused = any(finding.id in REFUSED for finding in self.findings)
        return MachineError.exit_code if refused or _breaks(self.findings) else 0


def doctor(
    facts_path: Path | None = None, *, report_file: Path | None = None, quick: bool = False, notify: Notify = unheard
) -> Examined:
    """Examine this machine, or a recorded one.

    The GPU self-test runs too, unless ``quick`` is set, the machine is a recorded one, or a finding already prevents
    training.

    Args:
        facts_path: file with a recorded machine, or None for this machine.
        report_file: file to which a report is written, or None.
        quick: whether to skip the GPU self-test.
        notify: receives the progress.

    Raises:
        UserError: the facts file is invalid.
        StorageError: the report cannot be written.
    """
    live = facts_path is None
    situation = situation_here(deep=True) if facts_path is None else situation_here(facts=load_facts(facts_path))
    env_plan = plan(situation)
    found = findings(situation, env_plan)
    if live and not quick and not _breaks(found) and stack_of(situation.facts, situation.selection) is not None:
        situation, trouble = _tested(situation, notify)
        env_plan = plan(situation)
        found = trouble + findings(situation, env_plan)
    tested_on = _tested_on(situation)
    if live:
        found = tuple(replace(finding, cure=tuple(map(_with_own_python, finding.cure))) for finding in found)
    if report_file is not None:
        write_report(report_file, situation, live=live, tested_on=tested_on)
        notify(f"Report: {report_file}")
    return Examined(situation, env_plan, found, tested_on)


def render(examined: Examined) -> str:
    """Return the findings as text."""
    return report_text(examined.situation, examined.findings, examined.tested_on).removesuffix("\n")


def result_of(examined: Examined) -> DoctorResult:
    """Return the document for ``--json``. A test pins its keys; a new key needs a higher ``format``."""
    situation, env_plan, found = examined.situation, examined.env_plan, examined.findings
    return DoctorResult(
        JSON_FORMAT,
        __version__,
        machine_text(situation),
        healthy(found),
        found,
        tuple(env_plan.variables),
        tuple(env_plan.setting_rows),
        situation.verdict.to_json() if situation.verdict is not None else None,
        situation.facts,
    )


def _breaks(found: tuple[Finding, ...]) -> bool:
    return any(finding.level == "breaks" for finding in found)


def _tested(situation: Situation, notify: Notify) -> tuple[Situation, tuple[Finding, ...]]:
    """Run the GPU self-test and return the situation with its result.

    If the test could not run, the situation is unchanged, and a finding with the reason is returned.
    """
    try:
        return replace(situation, verdict=self_test(situation, notify)), ()
    except LoraRocmError as error:
        trouble = Finding(
            "selftest-impossible",
            "breaks",
            "The self-test of the GPU could not run",
            f"{error.what} {error.where}".strip(),
            "torch cannot use the GPU, so a run could not either",
            (error.fix or "lora-rocm doctor --quick",),
            "self-test of this machine",
        )
        return situation, (trouble,)


def _tested_on(situation: Situation) -> str:
    """Return the day of the stored self-test, such as "2026-11-21"; empty if there is none."""
    if situation.verdict is None:
        return ""
    try:
        changed = path_of(Path(situation.app_dir), situation.verdict.stack).stat().st_mtime
    except OSError:
        return ""
    return time.strftime("%Y-%m-%d", time.localtime(changed))


def _with_own_python(line: str) -> str:
    """Return a pip command that uses the Python of this program.

    The command is unchanged if the path of Python would need quotes.
    """
    start = "python -m pip "
    if not line.startswith(start) or " " in sys.executable:
        return line
    return f"{sys.executable} -m pip {line.removeprefix(start)}"
