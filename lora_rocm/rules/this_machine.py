"""This machine's situation and environment plan, for every command that starts a process that loads torch.

The situation combines facts, stored self-test results, stored mitigations and the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm.foundation.terminal_text import printable
from lora_rocm.hardware.app_dir import app_dir, own_app_dir
from lora_rocm.hardware.facts import HostFacts
from lora_rocm.hardware.gpu_select import select
from lora_rocm.hardware.probe.detection import probe
from lora_rocm.hardware.selftest_result import stored
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.environment import EnvPlan, plan
from lora_rocm.rules.mitigation_store import described, forget, in_force, key_of, recall, workloads_of
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.tuned_rules import kept_choices

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

RECORDED_APP_DIR = {
    "windows": r"%LOCALAPPDATA%\lora-rocm",
    "linux": "~/.cache/lora-rocm",
    "macos": "~/Library/Caches/lora-rocm",
}
"""Text for the program's folder on a recorded machine, where the user's home folder is unknown."""


def situation_here(
    recipe: Recipe | None = None,
    facts: HostFacts | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    deep: bool = False,
) -> Situation:
    """Return the situation of a start on this machine, or on a recorded machine with its own variables.

    facts: facts of a recorded machine, or None for this machine.
    deep: whether to read slow facts, too.
    """
    live = facts is None
    found = probe(deep) if facts is None else facts
    seen = (os.environ if live else found.variables) if environ is None else environ
    folder = app_dir(seen, found.system) if live else None
    selection = select(found, seen)
    stack = stack_of(found, selection)
    verdict = stored(folder, stack) if folder is not None and stack is not None else None
    profile = recipe.runtime.profile if recipe is not None else "safe"
    own = str(folder) if folder is not None else RECORDED_APP_DIR[found.system]
    situation = Situation(found, selection, seen, own, recipe, profile, verdict)
    if folder is None:
        return situation
    here = replace(situation, tuned=kept_choices(folder, stack, recipe), today=date.today())
    return _with_changes(here, folder)


def _with_changes(situation: Situation, folder: Path) -> Situation:
    """Return the situation with the mitigations that are stored for this machine."""
    remembered = recall(folder, key_of(situation.facts, situation.selection))
    changes = in_force(remembered, workloads_of(situation.recipe))
    return replace(situation, changes=changes, remembered=remembered)


def forget_here() -> str:
    """Delete this machine's stored mitigations of all software stacks; return a text that lists them.

    Raises:
        StorageError: a file cannot be deleted.
    """
    gone = forget(own_app_dir())
    if not gone:
        return "No mitigations are stored for this machine."
    lines = ["Deleted mitigations, which the next run does not use:"]
    for path, entries in gone:
        lines += [f"  {text}" for text in described(entries)] or [f"  the contents of {path} (damaged)"]
    return "\n".join(map(printable, lines))


def plan_here(recipe: Recipe | None = None) -> EnvPlan:
    """Return the environment plan for a process that loads torch on this machine."""
    return plan(situation_here(recipe))
