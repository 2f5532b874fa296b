"""``lora-rocm doctor``: problems of a machine, ordered by harm, and their remedies.

A machine with notes only is healthy and gets one line on standard output. Progress goes to standard error.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lora_rocm import __version__
from lora_rocm.doctor.checks import findings
from lora_rocm.doctor.finding import Finding
from lora_rocm.doctor.report_file import write_report
from lora_rocm.doctor.text import healthy, machine_text, report_text
from lora_rocm.errors import LoraRocmError, MachineError
from lora_rocm.hardware.facts import load_facts
from lora_rocm.hardware.selftest_result import path_of
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.environment import EnvPlan, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.supervisor.selftest_runner import self_test

JSON_FORMAT = 1
REFUSED = ("attention-images",)
"""Findings of another level than "breaks" for which a run is refused as well (``rules.attention_refusal``)."""


def doctor(facts_path: Path | None, *, as_json: bool, report_file: Path | None, quick: bool) -> int:
    """Examine this machine, or a recorded one, and print the findings.

    The GPU is tested too, unless ``quick`` is set, the machine is a recorded one, or another finding breaks training.

    Returns:
        0, or 3 if there is a finding of level "breaks", or one for which no run is started.

    Raises:
        UserError: the facts file is invalid.
        StorageError: the report cannot be written.
    """
    live = facts_path is None
    situation = situation_here(deep=True) if facts_path is None else situation_here(facts=load_facts(facts_path))
    env_plan = plan(situation)
    found = findings(situation, env_plan)
    if live and not quick and not _breaks(found) and stack_of(situation.facts, situation.selection) is not None:
        situation, trouble = _tested(situation)
        env_plan = plan(situation)
        found = trouble + findings(situation, env_plan)
    tested_on = _tested_on(situation)
    if live:
        found = tuple(replace(finding, cure=tuple(map(_with_own_python, finding.cure))) for finding in found)
    if report_file is not None:
        write_report(report_file, situation, live=live, tested_on=tested_on)
        _say(f"Report: {report_file}")
    if as_json:
        text = json.dumps(as_data(situation, env_plan, found), indent=1) + "\n"
    else:
        text = report_text(situation, found, tested_on)
    sys.stdout.write(text)
    refused = any(finding.id in REFUSED for finding in found)
    return MachineError.exit_code if refused or _breaks(found) else 0


def as_data(situation: Situation, env_plan: EnvPlan, found: tuple[Finding, ...]) -> dict[str, Any]:
    """The output of ``--json``. A test freezes the keys; new ones raise ``format``."""
    return {
        "format": JSON_FORMAT,
        "lora_rocm": __version__,
        "machine": machine_text(situation),
        "healthy": healthy(found),
        "findings": [finding.to_json() for finding in found],
        "variables": [asdict(row) for row in env_plan.variables],
        "settings": [asdict(row) for row in env_plan.setting_rows],
        "selftest": situation.verdict.to_json() if situation.verdict is not None else None,
        "facts": situation.facts.to_json(),
    }


def _breaks(found: tuple[Finding, ...]) -> bool:
    return any(finding.level == "breaks" for finding in found)


def _tested(situation: Situation) -> tuple[Situation, tuple[Finding, ...]]:
    """The situation with a new verdict; or unchanged, with a finding that says why the test could not run."""
    try:
        return replace(situation, verdict=self_test(situation, _say)), ()
    except LoraRocmError as error:
        trouble = Finding(
            "selftest-impossible",
            "breaks",
            "The self-test of the GPU could not be made",
            f"{error.what} {error.where}".strip(),
            "torch does not get as far as using the GPU; a run would not either",
            (error.fix or "lora-rocm doctor --quick",),
            "self-test of this machine",
        )
        return situation, (trouble,)


def _tested_on(situation: Situation) -> str:
    """The day of the stored verdict ("2026-11-21"); empty without one."""
    if situation.verdict is None:
        return ""
    try:
        changed = path_of(Path(situation.app_dir), situation.verdict.stack).stat().st_mtime
    except OSError:
        return ""
    return time.strftime("%Y-%m-%d", time.localtime(changed))


def _with_own_python(line: str) -> str:
    """A pip command with the Python of this program, if its path needs no quotes."""
    start = "python -m pip "
    if not line.startswith(start) or " " in sys.executable:
        return line
    return f"{sys.executable} -m pip {line.removeprefix(start)}"


def _say(text: str) -> None:
    """Report progress on standard error, because standard output is the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
