"""The worker's environment variables."""

import json

import pytest

from lora_rocm.host.environ import RULES, environment_json, plan
from lora_rocm.recipe.schema import DataSection, Recipe, RuntimeSection, SdxlModel, TrainSection


def recipe(**runtime: object) -> Recipe:
    return Recipe(
        model=SdxlModel(name_or_path="builtin:tiny-sdxl"),
        data=DataSection(path="pics"),
        train=TrainSection(max_train_steps=1),
        runtime=RuntimeSection.model_validate(runtime),
    )


def test_what_is_always_set() -> None:
    rows = {row.variable: row.value for row in plan(recipe(), {}).rows}
    assert rows == {
        "PYTHONUTF8": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    assert plan(None, {}) == plan(recipe(), {})


@pytest.mark.parametrize(
    ("runtime", "variable", "value"),
    [({"deterministic": True}, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ({"threads": 3}, "OMP_NUM_THREADS", "3")],
)
def test_what_the_recipe_asks_for(runtime: dict[str, object], variable: str, value: str) -> None:
    assert {row.variable: row.value for row in plan(recipe(**runtime), {}).rows}[variable] == value


def test_the_user_wins_and_the_row_says_so() -> None:
    environ = {"OMP_NUM_THREADS": "7", "PYTHONUTF8": "", "PATH": "x"}
    made = plan(recipe(threads=3), environ)
    rows = {row.variable: row for row in made.rows}
    assert rows["OMP_NUM_THREADS"].value == "7" and rows["OMP_NUM_THREADS"].from_user
    assert rows["PYTHONUTF8"].value == "" and rows["PYTHONUTF8"].from_user
    assert not rows["TOKENIZERS_PARALLELISM"].from_user
    applied = made.applied_to(environ)
    assert applied["PATH"] == "x" and applied["OMP_NUM_THREADS"] == "7" and applied["PYTHONFAULTHANDLER"] == "1"
    assert environ == {"OMP_NUM_THREADS": "7", "PYTHONUTF8": "", "PATH": "x"}


def test_each_variable_has_one_rule_with_reason_and_source() -> None:
    assert len({rule.variable for rule in RULES}) == len(RULES)
    assert all(rule.why and rule.source for rule in RULES)


def test_environment_json_holds_no_other_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hunter2")
    saved = environment_json(plan(recipe(), {"SOME_SECRET": "hunter2"}))
    assert "hunter2" not in json.dumps(saved)
    assert saved["packages"]["pydantic"] and saved["memory_bytes"] > 0 and saved["variables"]
