"""The plan: who wins, what a child gets, what a run saves."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from lora_rocm.hardware.settings import VARIABLE, settings_from
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import EnvPlan, environment_json, plan, rules
from lora_rocm.rules.harmful_values import harms
from lora_rocm.rules.rule import SETTING, Situation
from tests.golden import machines
from tests.hardware.situations import facts_of, situation


def recipe(**runtime: object) -> Recipe:
    sections = {"model": {"name_or_path": "builtin:tiny-sdxl"}, "data": {"path": "pics"}, "runtime": runtime}
    return recipe_from({**sections, "train": {"max_train_steps": 1}})


def start(environ: dict[str, str] | None = None, **runtime: object) -> Situation:
    """On a machine without a GPU."""
    return replace(situation("cpu-only", environ or {}), recipe=recipe(**runtime))


def variables(made: EnvPlan) -> dict[str, str]:
    return {row.variable: row.value for row in made.variables}


def test_what_is_always_set() -> None:
    assert variables(plan(start())) == {
        "PYTHONUTF8": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    assert variables(plan(replace(start(), recipe=None))) == variables(plan(start()))


@pytest.mark.parametrize(
    ("runtime", "variable", "value"),
    [({"deterministic": True}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ({"threads": 3}, "OMP_NUM_THREADS", "3")],
)
def test_what_the_recipe_asks_for(runtime: dict[str, object], variable: str, value: str) -> None:
    assert variables(plan(start(**runtime)))[variable] == value


def test_the_user_wins_and_the_row_says_so() -> None:
    environ = {"OMP_NUM_THREADS": "7", "PYTHONUTF8": "", "PATH": "x", "PYTHONFAULTHANDLER": "1"}
    made = plan(start(dict(environ), threads=3))
    rows = {row.variable: row for row in made.rows}
    assert (rows["OMP_NUM_THREADS"].value, rows["OMP_NUM_THREADS"].planned) == ("7", "3")
    assert rows["OMP_NUM_THREADS"].from_user and rows["PYTHONUTF8"].from_user and rows["PYTHONUTF8"].value == ""
    assert rows["PYTHONFAULTHANDLER"].from_user and rows["PYTHONFAULTHANDLER"].planned is None
    assert not rows["TOKENIZERS_PARALLELISM"].from_user
    applied = made.applied_to(environ)
    assert applied["PATH"] == "x" and applied["OMP_NUM_THREADS"] == "7" and applied["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environ == {"OMP_NUM_THREADS": "7", "PYTHONUTF8": "", "PATH": "x", "PYTHONFAULTHANDLER": "1"}


def test_settings_travel_in_their_own_variable() -> None:
    made = plan(situation("linux-strix-halo"))
    assert settings_from(made.applied_to({})) == made.settings
    assert not [row for row in made.variables if row.variable.startswith(SETTING)]
    assert {row.variable for row in made.rows} == {row.variable for row in (*made.variables, *made.setting_rows)}


def test_environment_json_holds_no_other_variables() -> None:
    made = start({"SOME_SECRET": "hunter2", "PYTHONUTF8": "0"})
    saved = environment_json(plan(made), made.facts)
    assert "hunter2" not in json.dumps(saved)
    assert saved["packages"]["pydantic"] and saved["machine"]["memory_bytes"] > 0 and saved["variables"]
    assert saved["variables"][0]["value"] == "0" and saved["variables"][0]["planned"] == "1"


NAMES = sorted({name.replace("*", "1") for harm in harms() for name in harm.variables}) + ["PATH", "HOME", "PYTHONUTF8"]
VALUES = [
    "",
    "0",
    "1",
    "-1",
    "0,1",
    "GPU-0",
    "11.0.0",
    "x:y",
    "expandable_segments:True",
    "/opt/rocm",
    "\u0664",
    "a\nb",
]


@pytest.mark.parametrize("name", machines())
def test_any_environment_gives_a_plan_that_touches_only_what_it_names(name: str) -> None:
    dice = random.Random(name)
    planned_names = {rule.variable for rule in rules() if isinstance(rule.variable, str)}
    for _ in range(60):
        environ = {key: dice.choice(VALUES) for key in dice.sample(NAMES, dice.randrange(len(NAMES)))}
        made = plan(replace(situation(name, dict(environ)), ranks=dice.choice([1, 2])))
        applied = made.applied_to(environ)
        seen = [row.variable for row in made.rows]
        assert len(set(seen)) == len(seen), "one row for a variable"
        for key in (set(environ) | set(applied)) - {VARIABLE, STACK}:
            if key not in planned_names and not key.startswith("HSA_OVERRIDE_GFX_VERSION"):
                assert applied.get(key) == environ.get(key)
        for row in made.variables:
            assert applied[row.variable] == row.value
            assert row.replaced is None or row.rule.startswith("owner-")
        for warning in made.warnings:
            assert applied[warning.variable] == environ[warning.variable] == warning.value


@pytest.mark.parametrize("name", machines())
def test_a_plan_made_twice_is_the_same_and_stands_when_it_is_exported(name: str) -> None:
    first = plan(situation(name, {}))
    again = plan(situation(name, variables(first)))
    assert plan(situation(name, {})) == first
    assert variables(again).items() <= variables(first).items()
    assert not [row for row in again.rows if row.planned is not None or row.replaced is not None]


def test_facts_are_never_changed() -> None:
    before = facts_of("linux-strix-halo").to_json()
    plan(situation("linux-strix-halo"))
    assert facts_of("linux-strix-halo").to_json() == before
