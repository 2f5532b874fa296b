"""Presets and their changes in each shipped recipe. Afterwards they change nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_rocm.commands.new import NewRequest, new
from lora_rocm.errors import UserError
from lora_rocm.recipe.load import load_recipe, load_text, shipped_recipes
from lora_rocm.recipe.presets import PresetChange, applied, preset_changes, preset_named, presets

SHIPPED = sorted(shipped_recipes())
NAMES = [preset.name for preset in presets()]


def changes_of(preset: str, text: str) -> dict[str, PresetChange]:
    recipe = load_text(text, Path("recipe.yaml")).recipe
    return {change.key: change for change in preset_changes(preset_named(preset), recipe)}


def shipped(name: str) -> str:
    return shipped_recipes()[name if name.endswith(".yaml") else f"{name}.yaml"].read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_preset_gives_a_valid_recipe_and_then_changes_nothing_more(name: str) -> None:
    for preset in NAMES:
        text = shipped(name)
        changes = changes_of(preset, text)
        made = applied(text, [*changes.values()])
        assert changes_of(preset, made) == {}, preset
        assert all(change.why and change.before != change.after for change in changes.values())
        kept = [line for line in made.splitlines() if line.lstrip().startswith("#")]
        assert kept == [line for line in text.splitlines() if line.lstrip().startswith("#")], "comments stay"


def test_values_are_limited_and_related_ones_follow() -> None:
    quality = changes_of("best-quality", shipped("sdxl"))
    assert {key: (each.before, each.after) for key, each in quality.items()} == {
        "lora.rank": ("16", "32"),
        "lora.alpha": ("16", "32"),
    }
    memory = changes_of("little-memory", shipped("llm-chat"))
    assert memory["train.batch_size"].value == 1
    assert memory["train.gradient_accumulation_steps"].value == 16, "an update has as many samples as before"
    assert memory["model.quantization"].value == "nf4" and "sample.every_n_steps" not in memory
    assert "model.quantization" not in changes_of("little-memory", shipped("sdxl")), "the control"
    small = shipped("sdxl").replace("resolution: 1024", "resolution: 512")
    assert "data.resolution" not in changes_of("fast-look", small)
    assert changes_of("balanced", small)["data.resolution"].value == 1024


def test_sources_and_units_of_the_recipe_are_respected() -> None:
    epochs = shipped("sdxl").replace("max_train_steps: 2000", "epochs: 100")
    fast = changes_of("fast-look", epochs)
    assert fast["train.epochs"].value == 25 and "train.max_train_steps" not in fast
    sources = shipped("sdxl").replace("path: my-images ", "sources: [{path: my-images}] #")
    assert "data.resolution" not in changes_of("fast-look", sources)


def test_new_fills_in_a_preset_with_its_reasons(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    found = new(NewRequest(path, "sdxl", preset="Best Quality"))
    assert [value.key for value in found.values] == ["lora.rank", "lora.alpha", "output.name"]
    assert load_recipe(path).recipe.lora.rank == 32 and "# best-quality: " in path.read_text(encoding="utf-8")
    with pytest.raises(UserError) as caught:
        new(NewRequest(tmp_path / "other.yaml", "sdxl", preset="best-qualty"))
    assert caught.value.code == "no-preset" and "best-quality" in caught.value.fix
    assert not (tmp_path / "other.yaml").exists()
