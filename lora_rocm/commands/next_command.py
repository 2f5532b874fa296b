"""The command that comes next, as the last line of an output names it."""

from __future__ import annotations

from collections.abc import Sequence

from lora_rocm.families.registry import FAMILIES
from lora_rocm.foundation.terminal_text import quoted
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.recipe_family import family_in


def train_command(recipe_path: str, overrides: Sequence[str]) -> str:
    """Return the command that trains a recipe. ``overrides``: ``section.key=value`` settings."""
    return quoted(["lora-rocm", "train", recipe_path, *(word for each in overrides for word in ("--set", each))])


def command_after(run_dir: RunDir, state: str) -> str | None:
    """Return the command that continues a run, or shows what a finished one learned; None for a running one."""
    if state == "running":
        return None
    command = "resume"
    if state == "finished":
        family = family_in(run_dir.recipe)
        command = "compare"
        if family in FAMILIES.names and FAMILIES[family].trains_on_texts:
            command = "chat"
    return quoted(["lora-rocm", command, str(run_dir.path)])
