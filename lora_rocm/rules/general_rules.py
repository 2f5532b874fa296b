"""Rules for every machine (``general_rules.toml``), and functions for values that depend on the machine or recipe."""

from __future__ import annotations

from functools import cache
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

from lora_rocm.foundation.tables import by_name, read_rows
from lora_rocm.hardware.software_stack import stack_of
from lora_rocm.rules.rule import MachineRule, Situation


def _workspace_if_deterministic(situation: Situation) -> str | None:
    recipe = situation.recipe
    return ":4096:8" if recipe is not None and recipe.runtime.deterministic else None


def _threads_of_recipe(situation: Situation) -> str | None:
    recipe = situation.recipe
    return str(recipe.runtime.threads) if recipe is not None and recipe.runtime.threads is not None else None


def _gpu_expected(situation: Situation) -> str | None:
    hidden = situation.gpu is None and situation.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return None if hidden or stack_of(situation.facts, situation.selection) is None else "true"


def _inductor_folder(situation: Situation) -> str | None:
    recipe = situation.recipe
    if recipe is None or recipe.runtime.compile in ("auto", "off"):
        return None
    path: type[PurePath] = PureWindowsPath if situation.facts.system == "windows" else PurePosixPath
    return str(path(situation.app_dir) / "inductor")


FUNCTIONS = by_name(_workspace_if_deterministic, _threads_of_recipe, _inductor_folder, _gpu_expected)


@cache
def general_rules() -> tuple[MachineRule, ...]:
    """Return the rules for every machine. Errors are as in ``read_rows``."""
    return read_rows(Path(__file__).with_name("general_rules.toml"), MachineRule, FUNCTIONS)
