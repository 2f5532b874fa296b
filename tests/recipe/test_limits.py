"""Each number and each list of a recipe has limits, and values beyond them are refused before they take any memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.source_sections import DataSource
from lora_rocm.recipe.suggest import section_class
from tests.wording import mentions, says

MINIMAL = "model: {name_or_path: builtin:tiny-sdxl}\ndata: {path: pics}\ntrain: {max_train_steps: 10}\n"
NO_UPPER_LIMIT = {
    "optim.learning_rate": "takes no memory; above 0.01 it is questioned, and an update that is not finite is not made",
    "optim.text_encoder_learning_rate": "as learning_rate",
    "optim.embedding_learning_rate": "as learning_rate",
    "lora.overrides.learning_rate": "as learning_rate",
}

RECIPE = kinds_of({}).recipe


def fields_of(model: type[BaseModel] = RECIPE, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        section = section_class(field.annotation)
        if section is not None:
            yield from fields_of(section, f"{prefix}{name}{'[]' if section is DataSource else ''}.")
        if section is None or section is DataSource:
            yield f"{prefix}{name}", field


NAMES = ("gt", "ge", "lt", "le", "max_length")


def bounds_of(annotation: Any, limits: Any) -> Iterator[tuple[Any, set[str]]]:
    """(type, names of its limits) of each type in an annotation; the limits of a field are not for a list's items."""
    if hasattr(annotation, "__metadata__"):
        own = [part for found in annotation.__metadata__ for part in (getattr(found, "metadata", None) or [found])]
        yield from bounds_of(get_args(annotation)[0], [*limits, *own])
        return
    yield annotation, {name for limit in limits for name in NAMES if hasattr(limit, name)}
    of_items = get_origin(annotation) is tuple
    for part in get_args(annotation):
        if not isinstance(part, str) and part not in (..., type(None)):
            yield from bounds_of(part, [] if of_items else limits)


FIELDS = dict(fields_of())


@pytest.mark.parametrize("key", FIELDS)
def test_each_number_has_both_limits_and_each_list_a_length(key: str) -> None:
    field = FIELDS[key]
    for kind, limits in bounds_of(field.annotation, field.metadata):
        if kind in (int, float):
            assert limits & {"gt", "ge"}, f"{key}: no lower limit"
            assert limits & {"lt", "le"} or key in NO_UPPER_LIMIT, f"{key}: no upper limit"
        elif get_origin(kind) is tuple and ... in get_args(kind):
            assert "max_length" in limits, f"{key}: a list without end"


def test_the_walk_finds_what_there_is() -> None:
    found = {key for key in FIELDS if any(kind in (int, float) for kind, _ in bounds_of(FIELDS[key].annotation, []))}
    assert {"lora.rank", "lora.alpha", "optim.betas", "data.sources[].repeats", "timeouts.step"} <= found
    assert len(found) > 40 and set(NO_UPPER_LIMIT) <= found
    bare = [limits for kind, limits in bounds_of(int | None, []) if kind is int]
    assert bare == [set()], "the control: a number without limits is seen as one"


@pytest.mark.parametrize("value", ["1e8", "1e26", "100000000", "10" * 2000, "2049"])
def test_an_absurd_rank_is_refused_in_words(value: str, tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL + f"lora: {{rank: {value}}}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:4 lora.rank" and len(problem.what) < 120
    assert mentions(problem.what, "recipe/has-to-be-at-most-2048") or mentions(problem.what, "recipe/far-too-large")
    assert says(problem.fix, "recipe/the-default-is-16")


@pytest.mark.parametrize(
    "override",
    [
        "lora.alpha=1e26", "train.batch_size=1e6", "train.gradient_accumulation_steps=1e6", "sample.width=1000000",
        "sample.steps=1e6", "runtime.workers=1e4", "timeouts.step=1e12", "data.bucket_step=1e9", "data.repeats=1e6",
        "train.epochs=1e9", "output.keep_last=1e9", f"sample.prompts=[{', '.join(['x'] * 1001)}]",
        "data.sources=[{path: a, keep_tokens: 1e9}]", f"lora.targets=[{', '.join(['x'] * 1001)}]",
    ],
)  # fmt: skip
def test_other_absurd_values_are_refused(override: str, tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    (problem,) = caught.value.problems
    assert problem.where == f"--set {override.partition('=')[0]}" or "keep_tokens" in problem.where
    assert "at most" in problem.what or mentions(problem.what, "recipe/more-than-1000-items")
