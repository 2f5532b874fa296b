"""Output of ``lora-rocm env``: the environment plan as a table, as shell commands, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_rocm import __version__
from lora_rocm.errors import UserError
from lora_rocm.hardware.facts import HostFacts, load_facts
from lora_rocm.rules.environment import EnvPlan, EnvRow, Warned, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import Recipe

JSON_FORMAT = 1


@dataclass(frozen=True)
class EnvResult:
    """The environment that training gets.

    Attributes:
        format: version of this document's format.
        lora_rocm: version of this program.
        variables: planned environment variables.
        settings: planned settings of this program.
        warnings: harmful environment variables that the user has set.
        facts: recorded facts about the machine, which ``--facts`` can read.
    """

    format: int
    lora_rocm: str
    variables: tuple[EnvRow, ...]
    settings: tuple[EnvRow, ...]
    warnings: tuple[Warned, ...]
    facts: HostFacts


def planned(recipe: str | None, overrides: Sequence[str], facts_path: Path | None) -> tuple[Situation, EnvPlan]:
    """Return the machine's situation and its environment plan.

    Args:
        recipe: path or name of a recipe to plan for, or None.
        overrides: ``section.key=value`` settings.
        facts_path: file with a recorded machine, or None for this machine.

    Raises:
        UserError: recipe or facts cannot be read, or there are overrides without a recipe.
    """
    if overrides and recipe is None:
        raise UserError("set-without-recipe", "--set changes a recipe, but none is given.", fix="Name the recipe.")
    facts = load_facts(facts_path) if facts_path is not None else None
    situation = situation_here(_loaded(recipe, overrides) if recipe is not None else None, facts)
    return situation, plan(situation)


def result_of(situation: Situation, env_plan: EnvPlan) -> EnvResult:
    """Return the document for ``--json``: the environment plan with the machine's facts."""
    variables, settings = tuple(env_plan.variables), tuple(env_plan.setting_rows)
    return EnvResult(JSON_FORMAT, __version__, variables, settings, tuple(env_plan.warnings), situation.facts)


def _loaded(recipe: str, overrides: Sequence[str]) -> Recipe:
    # recipe: the user names it
    from lora_rocm.recipe.load import load_recipe  # a slow import that env rarely needs

    return load_recipe(recipe, overrides).recipe
