"""Configurations that people wrote for other trainers: each can be written as one recipe, with nothing missing.

``other_trainers.toml`` has the settings of each that used to be missing, and the keys of a recipe for each setting.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.load import load_recipe

TABLE = tomllib.loads(Path(__file__).with_name("other_trainers.toml").read_text(encoding="utf-8"))
BASE: dict[str, dict[str, Any]] = {
    "model": {"name_or_path": "builtin:tiny-sdxl"},
    "data": {"path": "images"},
    "optim": {"optimizer": "adamw"},
    "train": {"epochs": 10},
    "sample": {"prompts": ["a cat"]},
}


def recipe_of(settings: list[str], folder: Path) -> Path:
    """A recipe with these settings, written to a file."""
    sections = {name: dict(keys) for name, keys in BASE.items()}
    for setting in settings:
        for name, keys in TABLE["settings"][setting].items():
            sections[name] = {**sections.get(name, {}), **keys}
    if "sources" in sections["data"]:
        del sections["data"]["path"]
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", TABLE["configurations"])
def test_a_configuration_is_one_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"lora_unet_x.lora_down.weight": np.zeros((4, 2))}, tmp_path / "start.safetensors")
    load_recipe(recipe_of(TABLE["configurations"][name], tmp_path))


def test_a_setting_that_is_no_key_is_refused(tmp_path: Path) -> None:
    """The control."""
    path = recipe_of(["Prodigy"], tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace('"epochs"', '"epoch_count"'), encoding="utf-8")
    with pytest.raises(RecipeError, match="epoch_count"):
        load_recipe(path)


def test_every_setting_is_used() -> None:
    assert {name for names in TABLE["configurations"].values() for name in names} == TABLE["settings"].keys()
    assert len(TABLE["configurations"]) >= 41
