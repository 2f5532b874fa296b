"""Plans the environment of processes that load torch, from the machine and the recipe, by a table of rules.

Variables must be set before a process starts, because a GPU runtime copies the environment once and Python reads some
variables at its start. The parent therefore plans them, and ``supervisor.worker_process`` starts the worker with them.
A value that the user exported takes precedence, unless the rule overrides it (``MachineRule.over_user``). If the user's
value is known to harm, there is a warning.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from lora_rocm import __version__
from lora_rocm.foundation.packages import versions_of
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.settings import VARIABLE, Settings
from lora_rocm.hardware.software_stack import STACK, stack_of
from lora_rocm.rules.amd_rules import amd_table
from lora_rocm.rules.general_rules import general_rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.memory_rules import memory_table
from lora_rocm.rules.mitigations import change_rules
from lora_rocm.rules.rule import SETTING, Level, MachineRule, Situation
from lora_rocm.rules.selftest_rules import verdict_rules
from lora_rocm.rules.tuned_rules import tuned_rules

PACKAGES = (
    "torch",
    "transformers",
    "diffusers",
    "peft",
    "accelerate",
    "datasets",
    "safetensors",
    "numpy",
    "Pillow",
    "pydantic",
)


@cache
def rules() -> tuple[MachineRule, ...]:
    """Return all rules in the order in which they apply; a later rule replaces an earlier one for the same variable."""
    first = general_rules() + amd_table().rule + memory_table().rule + verdict_rules()
    return first + tuned_rules() + change_rules()  # a trial checks each kernel itself; changes after failures win


@dataclass(frozen=True)
class EnvRow:
    """One planned variable or setting.

    from_user: whether the user's value is used. If so, ``planned`` is the rule's value, unless both are equal.
    replaced: the user's value that the rule replaced, if any.
    """

    rule: str
    variable: str
    value: str
    why: str
    source: str
    from_user: bool = False
    replaced: str | None = None
    planned: str | None = None
    reviewed: str = ""


@dataclass(frozen=True)
class Warned:
    """A variable that the user set to a harmful value. The remedy is to unset it."""

    rule: str
    variable: str
    value: str
    what: str
    source: str
    level: Level


@dataclass(frozen=True)
class EnvPlan:
    """Variables and settings planned for a process that loads torch, in addition to the environment that it inherits.

    stack: key of the software stack and the GPU; empty if there is none.
    """

    rows: tuple[EnvRow, ...]
    warnings: tuple[Warned, ...] = ()
    stack: str = ""

    @property
    def settings(self) -> Settings:
        """Settings of the rows with a variable that starts with "setting:"."""
        # json: a job or an answer of another process of the same start
        chosen = {row.variable.removeprefix(SETTING): json.loads(row.value) for row in self.setting_rows}
        return Settings(**chosen)

    @property
    def setting_rows(self) -> tuple[EnvRow, ...]:
        return tuple(row for row in self.rows if row.variable.startswith(SETTING))

    @property
    def variables(self) -> tuple[EnvRow, ...]:
        return tuple(row for row in self.rows if not row.variable.startswith(SETTING))

    def applied_to(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment of a child process: ``environ`` with the planned variables."""
        planned = {row.variable: row.value for row in self.variables}
        return {**environ, **planned, VARIABLE: self.settings.to_text(), STACK: self.stack}


def plan(situation: Situation) -> EnvPlan:
    """Plan the environment for one start of a process that loads torch on this machine."""
    planned: dict[str, EnvRow] = {}  # the last rule for a variable wins; rules of the self-test come late
    for rule in rules():
        found = rule.planned(situation)
        if found is not None:
            planned[found[0]] = _row(rule, *found, situation)
    rows = tuple(planned.values())
    gone = {row.variable for row in rows if row.replaced is not None}
    warnings = [
        Warned(harm.id, name, value, harm.what, harm.source, harm.level)
        for harm in harms()
        for name, value in harm.found(situation)
        if name not in gone
    ]
    stack = stack_of(situation.facts, situation.selection)
    return EnvPlan(rows, tuple(warnings), "" if stack is None else stack.key)


def _row(rule: MachineRule, variable: str, value: str, situation: Situation) -> EnvRow:
    why = rule.why + (rule.evidence(situation) if rule.evidence is not None else "")
    row = EnvRow(rule.id, variable, value, why, rule.source, reviewed=rule.reviewed)
    theirs = situation.environ.get(variable)
    if theirs is None or theirs == value:
        return replace(row, from_user=theirs is not None)
    if rule.over_user:
        return replace(row, replaced=theirs)
    return replace(row, value=theirs, from_user=True, planned=value)


def environment_json(env_plan: EnvPlan, facts: HostFacts) -> dict[str, Any]:
    """Return the record of a run's environment: versions, machine, and planned variables.

    Other variables are omitted, because they may be secret.
    """
    versions = versions_of(PACKAGES)
    return {
        "lora_rocm": __version__,
        "python_build": sys.version,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": {name: versions.get(name) for name in PACKAGES},
        "machine": facts.to_json(),
        "variables": [asdict(row) for row in env_plan.variables],
        "settings": [asdict(row) for row in env_plan.setting_rows],
        "warnings": [asdict(warning) for warning in env_plan.warnings],
    }
