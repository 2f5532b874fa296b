"""The family of a run from the text of its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.recipe.load import dump_recipe, load_recipe, shipped_recipes
from lora_rocm.rundir.recipe_family import family_in


@pytest.mark.parametrize("name", ["demo.yaml", "demo-causal-lm.yaml", "flux.yaml"])
def test_it_is_the_family_of_the_loaded_recipe(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(shipped_recipes()[name]).recipe
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert family_in(tmp_path / "recipe.yaml") == recipe.model.family


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("model: {name_or_path: x, family: sd15}\n", "sd15"),
        ("# family: no\nmodel:\n  name_or_path: x\n\n  family: 'z-image'\n", "z-image"),
        ("lora:\n  family: sdxl\n", None),
        ("model:\n  name_or_path: x\nlora:\n  family: sdxl\n", None),
        ("", None),
        (" " * 100_000, None),
    ],
)
def test_a_recipe_that_this_program_did_not_write(text: str, family: str | None, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert family_in(tmp_path / "recipe.yaml") == family


def test_a_recipe_that_is_missing_or_no_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"model: {family: \xff}")
    assert family_in(tmp_path / "recipe.yaml") is None and family_in(tmp_path / "none") is None
