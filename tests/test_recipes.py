"""Every recipe that ships is valid, short, explained, and found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DEMOS = ("demo", "demo-z-image")
OTHERS = (
    "anima",
    "flux",
    "llm-chat",
    "llm-dpo",
    "llm-qlora",
    "llm-strix-halo",
    "sd15",
    "sdxl",
    "sdxl-character",
    "sdxl-lowvram",
    "z-image",
)
PROMISED = {f"{name}.yaml" for name in DEMOS + OTHERS}


def test_the_promised_recipes_are_there() -> None:
    assert {path.name for path in RECIPES} >= PROMISED
    assert set(shipped_recipes()) == {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_fits_the_schema(path: Path) -> None:
    recipe_from(YAML(typ="safe").load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_loads_without_notices(path: Path) -> None:
    loaded = load_recipe(path)
    assert loaded.notices == ()
    assert loaded.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_is_short_and_begins_with_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith("# ")


def test_found_by_name_outside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/demo.yaml").recipe.model.name_or_path == "builtin:tiny-sdxl"


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_needs_nothing_but_the_package(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
    assert recipe.model.name_or_path.startswith("builtin:")
    assert all((source.path or "").startswith("builtin:") for source in recipe.data.resolved_sources())
