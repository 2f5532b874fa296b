"""The list of shipped recipes, and the recipe that suits a model."""

from __future__ import annotations

import pytest

from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.recipe.load import load_recipe, shipped_recipes
from lora_rocm.recipe.shipped import recipe_for, shipped, shipped_named


def test_each_recipe_is_listed_with_its_family_and_one_sentence() -> None:
    found = shipped()
    assert {f"{recipe.name}.yaml": recipe.path for recipe in found} == shipped_recipes()
    for recipe in found:
        assert recipe.family == load_recipe(recipe.path).recipe.model.family
        assert recipe.purpose.endswith(".") and ". " not in recipe.purpose and len(recipe.purpose) > 20
    demos = [recipe.is_demo for recipe in found]
    assert demos == sorted(demos) and any(demos)


@pytest.mark.parametrize("name", ["sdxl", "sdxl.yaml", " SDXL"])
def test_a_recipe_is_found_by_name(name: str) -> None:
    assert shipped_named(name).name == "sdxl"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as raised:
        shipped_named("sdxl-charakter")
    assert raised.value.code == "no-shipped-recipe" and "sdxl-character" in raised.value.fix


@pytest.mark.parametrize("family", FAMILIES.names)
def test_every_family_has_a_usual_recipe(family: str) -> None:
    wanted = {"sd2": "sd15", "causal-lm": "llm-chat"}.get(family, family)
    assert recipe_for([family], "x").name == wanted


def test_pairs_have_their_own_recipe() -> None:
    assert recipe_for(["causal-lm"], "x", pairs=True).name == "llm-dpo"


@pytest.mark.parametrize("families", [["sdxl", "flux"], [], ["sd15", "sd2"]])
def test_several_families_or_none_are_an_error(families: list[str]) -> None:
    with pytest.raises(ModelError) as raised:
        recipe_for(families, "--model x")
    assert raised.value.code == "family-unclear" and "--from" in raised.value.fix
