"""This machine's situation and plan, for every command that starts a heavy process.

It combines facts, stored self-test result, stored mitigations and recipe.
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
"""The program's folder on a recorded machine; its user's home is unknown."""


def situation_here(
    recipe: Recipe | None = None,
    facts: HostFacts | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    deep: bool = False,
) -> Situation:
    """The situation of a start on this machine, or on a recorded one with its own variables.

    ``deep``: also read slow facts.
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
    """The situation with the mitigations stored for this machine."""
    remembered = recall(folder, key_of(situation.facts, situation.selection))
    changes = in_force(remembered, workloads_of(situation.recipe))
    return replace(situation, changes=changes, remembered=remembered)


def forget_here() -> str:
    """Forget the stored mitigations of this machine for all software stacks; return them as text.

    Raises:
        StorageError: they cannot be deleted.
    """
    gone = forget(own_app_dir())
    if not gone:
        return "Nothing was remembered about this machine."
    lines = ["Forgotten; the next run begins without:"]
    for path, entries in gone:
        lines += [f"  {text}" for text in described(entries)] or [f"  what {path} held (damaged)"]
    return "\n".join(map(printable, lines))


def plan_here(recipe: Recipe | None = None) -> EnvPlan:
    """The environment plan for a heavy process on this machine."""
    return plan(situation_here(recipe))
