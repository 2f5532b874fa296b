"""``data.watched``: samples of any family; their loss is measured, and they change nothing in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_rocm.errors import RecipeError
from lora_rocm.recipe.load import dump_recipe, load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.program import images
from tests.train.runs import bytes_of, make_recipe, start, write_material
from tests.wording import saying

VALIDATION = {"max_train_steps": 2, "gradient_accumulation_steps": 1, "validation_every_n_steps": 1}


def recipe_of(material: Path, watched: dict[str, Any] | None, **train: int) -> Recipe:
    data = {"flip_aug": True, "shuffle_caption": True, "watched": watched}
    return make_recipe(material, data=data, train={**VALIDATION, **train})


def test_the_watched_recipe_holds_all_of_the_source_out(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"path": str(tmp_path / "other")})
    watching = recipe.watching
    assert watching is not None and watching.data.validation_split == 1.0
    (source,) = watching.data.resolved_sources()
    assert source.path == str(tmp_path / "other") and source.resolution == 64
    assert watching.objective == recipe.objective and watching.data.watched is None
    assert recipe_of(tmp_path, None).watching is None
    assert recipe_of(tmp_path, {"path": "other"}, validation_every_n_steps=0).watching is None


def test_what_the_section_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    path = tmp_path / "r.yaml"
    path.write_text(dump_recipe(recipe_of(tmp_path, {"path": "images"})), encoding="utf-8")
    for given, said in (
        ("{path: images, dataset: a/b}", "give exactly one of path and dataset"),
        ("{path: images, is_reg: true}", r"data.watched.is_reg"),
        ("{path: missing}", "data.watched.path: there is no folder"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_recipe(path, [f"data.watched={given}"]).require_files()


@pytest.mark.slow
def test_images_are_watched_too_and_training_is_as_without(tmp_path: Path) -> None:
    material = write_material(tmp_path)
    images(tmp_path / "other", 3)
    losses = dict[str, list[float]]()
    for name, watched in (("plain", None), ("watched", {"path": str(tmp_path / "other")})):
        assert start(recipe_of(material, watched), tmp_path / name)
        events = read_events(RunDir(tmp_path / name).events())
        found = [event for event in events if event["type"] == "watched"]
        losses[name] = [event["loss"] for event in found]
        assert [event["updates"] for event in found] == ([0, 1, 2] if watched else [])
    assert bytes_of(tmp_path / "watched") == bytes_of(tmp_path / "plain")
    assert len(set(losses["watched"])) == 3 and all(loss > 0 for loss in losses["watched"])


def test_what_is_trained_on_cannot_be_watched(tmp_path: Path) -> None:
    text = "model: {name_or_path: builtin:tiny-sdxl}\ntrain: {max_train_steps: 1, validation_every_n_steps: 1}\n"
    text += "data: {path: %s, watched: {path: %s}}\n"
    (tmp_path / "r.yaml").write_text(text % ("pics", "./pics"), encoding="utf-8")
    with pytest.raises(RecipeError, check=saying("train/is-trained-on")):
        load_recipe(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text(text % ("pics", "others"), encoding="utf-8")
    assert load_recipe(tmp_path / "r.yaml").recipe.data.watched is not None, "the control"
