"""Pydantic's findings in the user's words."""

from typing import Any

import pytest

from lora_rocm.errors import Problem
from lora_rocm.recipe.explain import boolean_problems, explain, shown
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.yaml_tree import dotted

GOOD: dict[str, Any] = {
    "model": {"name_or_path": "builtin:tiny-sdxl"},
    "data": {"path": "pics"},
    "train": {"max_train_steps": 10},
}


def problems_of(**changes: Any) -> list[Problem]:
    from pydantic import ValidationError

    data = GOOD | changes
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(data)
    return explain(caught.value, data, dotted)


@pytest.mark.parametrize(
    ("changes", "where", "what", "fix"),
    [
        ({"lora": {"rank": "sixteen"}}, "lora.rank", "expected a whole number, got 'sixteen'", ""),
        ({"lora": {"rank": 1.5}}, "lora.rank", "expected a whole number, got 1.5", ""),
        ({"lora": {"rank": 0}}, "lora.rank", "has to be greater than 0, got 0", ""),
        ({"lora": {"dropout": 1}}, "lora.dropout", "has to be less than 1.0, got 1", ""),
        ({"lora": {"use_dora": "maybe"}}, "lora.use_dora", "expected true or false, got 'maybe'", ""),
        ({"lora": {"targets": 3}}, "lora.targets", "expected text or a list, got 3", '"3"'),
        ({"lora": {"targets": ["a", 3]}}, "lora.targets", "expected text", ""),
        ({"lora": 3}, "lora", "expected a section with keys, got 3", ""),
        ({"output": {"name": 7}}, "output.name", "expected text, got 7", 'in quotes: "7"'),
        ({"output": {"dtype": "fp61"}}, "output.dtype", "expected one of fp16, bf16, fp32; got 'fp61'", "fp16"),
        ({"optim": {"betas": [0.9]}}, "optim.betas", "has too few values: [0.9]", ""),
        ({"model": {}}, "model.name_or_path", "is missing", "diffusers folder"),
        ({"train": {}}, "train", "give exactly one of max_train_steps and epochs", ""),
        ({"data": {"sources": [{"path": 3}]}}, "data.sources[0].path", "expected text, got 3", ""),
        ({"data": {"sources": [{"repets": 3, "path": "a"}]}}, "data.sources[0].repets", "no such key", "repeats"),
        ({"loraa": {}}, "loraa", "there is no such key", "Did you mean lora?"),
    ],
)
def test_one_problem(changes: dict[str, Any], where: str, what: str, fix: str) -> None:
    (problem,) = problems_of(**changes)
    assert problem.where == where
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"lora": {"rank": True}}, ["lora.rank"]),
        ({"lora": {"alpha": False}}, ["lora.alpha"]),
        ({"optim": {"betas": [True, 0.9]}}, ["optim.betas"]),
        ({"data": {"sources": [{"path": "a", "repeats": True}]}}, ["data.sources[0].repeats"]),
        ({"lora": {"use_dora": True, "rank": 3}, "unknown": True}, []),
    ],
)
def test_true_is_no_number(changes: dict[str, Any], where: list[str]) -> None:
    assert [problem.where for problem in boolean_problems(GOOD | changes, dotted)] == where


def test_shown_is_short_and_printable() -> None:
    assert shown("x" * 100).endswith("...") and len(shown("x" * 100)) == 60
    assert shown("a\nb") == r"'a\nb'"
    assert shown("größe") == "'größe'"
    assert shown({"a": 1}) == "a section"
