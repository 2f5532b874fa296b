"""Recipe without a browser: the list, the text and its fields, live checks, saving with its version, undo, copies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.recipe.load import load_text
from lora_rocm.recipe.recipe_fields import EXCLUSIVE
from lora_rocm.ui.edits import version_of
from tests.ui.site import Site, code_of

RECIPE = """\
# Nothing here is lost.
model:
  name_or_path: builtin:tiny-sdxl   # the base
data: {path: "builtin:demo"}

lora:
  rank: 16                  # 8 for a simple subject
train:
  max_train_steps: 40
"""
FILE = "my recipe.yaml"


@pytest.fixture
def recipe(site: Site) -> Path:
    path = site.folder / FILE
    path.write_text(RECIPE, encoding="utf-8")
    return path


def draft(site: Site, text: str, key: str = "", value: str = "") -> dict[str, Any]:
    answer = site.client.post("/recipe/draft", params={"file": FILE}, data={"text": text, "key": key, "value": value})
    assert answer.status_code == 200, answer.text
    return dict(json.loads(answer.text))


def save(site: Site, text: str, version: str) -> Any:
    headers = {"if-match": f'"{version}"', "hx-request": "true"}
    return site.client.post("/recipe/save", params={"file": FILE}, data={"text": text}, headers=headers)


def test_the_list_has_recipes_and_no_other_yaml_file(site: Site, recipe: Path) -> None:
    (site.folder / "recipes").mkdir()
    (site.folder / "recipes" / "second.yml").write_text(RECIPE, encoding="utf-8")
    (site.folder / "compose.yaml").write_text("services: {}\n", encoding="utf-8")
    (site.folder / "broken.yaml").write_bytes(b"model:\n\xff")
    text = site.get("/recipe")
    assert "my recipe.yaml" in text and "recipes/second.yml" in text and "Nothing here is lost." in text
    assert "compose.yaml" not in text and "broken.yaml" not in text


TEXTS = """\
model: {family: causal-lm, name_or_path: "builtin:tiny-llama"}
data:
  sources:
    - dataset: chats.jsonl
train:
  epochs: 2  # few texts
sample:
  every_n_epochs: 1
  prompts: [Who?]
"""


def shown_fields(page: str) -> set[str]:
    usual = page.partition("view-simple")[2].partition("view-full")[0]
    found = re.findall(r'<div class="field recipe-field[^"]*" data-field="([^"]*)"( hidden)?>', usual)
    return {key for key, is_hidden in found if not is_hidden}


def test_the_usual_keys_are_those_that_are_set(site: Site) -> None:
    (site.folder / FILE).write_text(TEXTS, encoding="utf-8")
    page = site.get("/recipe/edit", file=FILE)
    assert {"data.sources", "sample.every_n_epochs", "output.save_every_n_steps"} <= shown_fields(page)
    assert not {"data.path", "sample.every_n_steps", "output.save_every_n_epochs"} & shown_fields(page)
    assert "- dataset: chats.jsonl" in page.partition("view-full")[0]
    assert "--n " not in page and "negative_prompt" not in page.partition("<recipe-editor")[2]
    (site.folder / FILE).write_text(RECIPE, encoding="utf-8")
    of_images = site.get("/recipe/edit", file=FILE)
    assert {"data.path", "sample.every_n_steps"} <= shown_fields(of_images) and "--n " in of_images
    assert not {"data.sources", "sample.every_n_epochs"} & shown_fields(of_images)


def test_a_field_empties_the_one_that_it_excludes(site: Site) -> None:
    found = draft(site, TEXTS, "train.max_train_steps", "40")
    assert found["is_valid"] and found["values"]["train.max_train_steps"] == "40"
    assert "train.epochs" not in found["values"] and "epochs: 2" not in found["text"]
    found = draft(site, TEXTS, "sample.every_n_steps", "5")
    assert found["is_valid"] and "every_n_epochs" not in found["text"]
    by_hand = draft(site, TEXTS.replace("  epochs", "  max_train_steps: 40\n  epochs"))
    assert not by_hand["is_valid"] and "epochs: 2" in by_hand["text"]
    (site.folder / "below.yaml").write_text(TEXTS, encoding="utf-8")
    for key in ("train.max_train_steps", "sample.every_n_steps"):  # the base sets the excluded key
        assert draft(site, "base: below.yaml\n", key, "5")["is_valid"]


def test_every_rule_of_two_exclusive_values_empties_one() -> None:
    from lora_rocm.recipe.key_rules.run_rules import RULES

    pairs = {rule.keys for rule in RULES if rule.id.startswith(("both:", "not-both:")) and len(rule.keys) == 2}
    assert pairs == set(EXCLUSIVE)


def test_an_empty_folder_says_what_a_recipe_is(site: Site) -> None:
    assert "empty-title" in site.get("/recipe")


def test_the_page_has_the_text_and_every_key(site: Site, recipe: Path) -> None:
    from lora_rocm.recipe.kinds import kinds_of
    from lora_rocm.recipe.recipe_fields import field_sections

    text = site.get("/recipe/edit", file=FILE)
    assert "# Nothing here is lost." in text
    for section in field_sections(kinds_of({})):
        for field in section.fields:
            assert f'data-key="{field.key}"' in text, field.key


def test_a_field_changes_only_its_line(site: Site, recipe: Path) -> None:
    found = draft(site, RECIPE, "lora.rank", "8")
    assert found["text"] == RECIPE.replace("rank: 16 ", "rank: 8  ") and found["is_valid"]
    assert found["values"]["lora.rank"] == "8"
    assert recipe.read_text(encoding="utf-8") == RECIPE  # nothing is written before it is saved
    found = draft(site, found["text"], "lora.rank", "")
    assert "rank" not in found["text"] and "# Nothing here is lost." in found["text"]


def test_a_wrong_value_is_named_at_its_field(site: Site, recipe: Path) -> None:
    found = draft(site, RECIPE, "lora.rank", "many")
    assert set(found["faults"]) == {"lora.rank"} and not found["is_valid"] and "^^^^" in found["verdict"]
    assert 'data-line="7"' in found["verdict"]
    assert draft(site, RECIPE)["faults"] == {}


def test_a_text_that_is_no_yaml_stops_the_fields_and_not_the_page(site: Site, recipe: Path) -> None:
    found = draft(site, "model: [")
    assert not found["is_yaml"] and "problem" in found["verdict"]
    where = {"params": {"file": FILE}, "data": {"text": "model: [", "key": "lora.rank", "value": "8"}}
    assert site.client.post("/recipe/draft", **where).status_code == 422


def test_another_family_has_other_fields(site: Site, recipe: Path) -> None:
    before = draft(site, RECIPE)
    after = draft(site, RECIPE, "model.family", "causal-lm")
    assert before["shape"] != after["shape"]
    html = site.client.post("/recipe/fields", params={"file": FILE}, data={"text": after["text"]}).text
    assert 'data-key="objective.train_on"' in html and 'data-key="data.resolution"' not in html


def test_saving_needs_the_version_that_the_page_got(site: Site, recipe: Path) -> None:
    version = version_of(recipe.read_bytes())
    first = save(site, RECIPE + "# mine\n", version)
    assert first.status_code == 200 and recipe.read_text(encoding="utf-8").endswith("# mine\n")
    second = save(site, RECIPE + "# theirs\n", version)
    assert second.status_code == 409 and code_of(second.text) == "edit-conflict"
    assert f'data-version="{first.json()["version"]}"' in second.text
    assert recipe.read_text(encoding="utf-8").endswith("# mine\n")
    # Neither is a save undone that the page has not shown, nor a recipe trained
    for address in ("/recipe/undo", "/recipe/start"):
        old = site.client.post(address, params={"file": FILE}, headers={"if-match": version, "hx-request": "true"})
        assert old.status_code == 409 and code_of(old.text) == "edit-conflict"
    assert site.context.launches.all() == []
    now = {"if-match": first.json()["version"]}
    undone = site.client.post("/recipe/undo", params={"file": FILE}, headers=now)
    assert undone.json()["text"] == RECIPE == recipe.read_text(encoding="utf-8")


def test_without_scripts_it_is_saved_as_well_and_line_ends_stay(site: Site, recipe: Path) -> None:
    recipe.write_bytes(RECIPE.replace("\n", "\r\n").encode())
    data = {"text": RECIPE.replace("\n", "\r\n") + "# more\r\n", "version": version_of(recipe.read_bytes())}
    answer = site.client.post("/recipe/save", params={"file": FILE}, data=data, follow_redirects=False)
    assert answer.status_code == 303
    assert recipe.read_bytes() == (RECIPE + "# more\n").replace("\n", "\r\n").encode()


def test_a_copy_replaces_nothing(site: Site, recipe: Path) -> None:
    answer = site.client.post("/recipe/copy", params={"file": FILE}, data={"name": "second"}, follow_redirects=False)
    assert answer.status_code == 303 and (site.folder / "second.yaml").read_text(encoding="utf-8") == RECIPE
    again = site.client.post("/recipe/copy", params={"file": FILE}, data={"name": "second"})
    assert again.status_code == 422 and code_of(again.text) == "file-exists"
    out = site.client.post("/recipe/copy", params={"file": FILE}, data={"name": "../out"})
    assert code_of(out.text) == "outside-folders" and not (site.folder.parent / "out.yaml").exists()


def test_only_yaml_files_are_shown_and_changed(site: Site) -> None:
    (site.folder / "notes.txt").write_text("private", encoding="utf-8")
    for address in ("/recipe/edit", "/recipe/present"):
        answer = site.client.get(address, params={"file": "notes.txt"})
        assert code_of(answer.text) == "recipe-suffix" and "private" not in answer.text
    assert save_as(site, "notes.txt").status_code == 422
    assert (site.folder / "notes.txt").read_text(encoding="utf-8") == "private"
    assert code_of(site.client.get("/recipe/edit", params={"file": "none.yaml"}).text) == "no-recipe"


def save_as(site: Site, name: str) -> Any:
    version = version_of((site.folder / name).read_bytes())
    return site.client.post("/recipe/save", params={"file": name}, data={"text": "x"}, headers={"if-match": version})


def test_a_hostile_recipe_is_only_text(site: Site, recipe: Path) -> None:
    hostile = 'model: {name_or_path: "<script>alert(1)</script>"}\nlora: {"</textarea><script>": 1}\n'
    recipe.write_text(hostile, encoding="utf-8")
    assert "<script>alert" not in site.get("/recipe/edit", file=FILE)
    assert "<script>" not in draft(site, hostile)["verdict"]


def test_a_preset_is_shown_as_a_difference_and_applied_to_the_text(site: Site) -> None:
    path = site.folder / FILE
    path.write_text(RECIPE, encoding="utf-8")
    ask = lambda name, **more: site.client.post(  # noqa: E731
        f"/recipe/{name}", params={"file": FILE}, data={"text": RECIPE, "preset": "best-quality", **more}
    )
    shown = ask("preset").text
    assert "lora.rank" in shown and "<b>32</b>" in shown and 'data-apply="best-quality"' in shown
    made = ask("preset/apply").json()["text"]
    assert load_text(made, path).recipe.lora.rank == 32 and path.read_text(encoding="utf-8") == RECIPE
    assert all(line in made for line in ("# Nothing here is lost.", "# the base", "# 8 for a simple subject"))
    assert "data-apply" not in ask("preset", text=made).text, "nothing is left to change"
    assert code_of(ask("preset", preset="nothing").text) == "no-preset"
    assert ask("preset", text="data: [").status_code == 422
