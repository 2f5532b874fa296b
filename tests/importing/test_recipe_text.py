"""The recipe that is written: its order, its comments, its values read back."""

from __future__ import annotations

from ruamel.yaml import YAML

from lora_rocm.importing.recipe_text import MAX_COMMENT_LETTERS, recipe_text
from lora_rocm.importing.setting import Setting
from lora_rocm.importing.translator import RecipeValue


def test_keys_have_the_order_of_the_schema_and_comments() -> None:
    setting = Setting("network_dim", 8, "a.toml", 3)
    text = recipe_text(
        {
            "train.epochs": RecipeValue(3, (Setting("epochs", 3),)),
            "data.sources[4].path": RecipeValue("b", ()),
            "data.sources[1].path": RecipeValue("a: #", ()),
            "data.sources[1].repeats": RecipeValue(2, ()),
            "lora.rank": RecipeValue(8, (setting,), "note"),
            "model.name_or_path": RecipeValue("x", ()),
        },
        ["head"],
    )
    assert text.startswith("# head\n")
    sections = ["model", "data", "lora", "train"]
    assert [line[:-1] for line in text.splitlines() if line in [f"{name}:" for name in sections]] == sections
    (line,) = [line for line in text.splitlines() if "rank" in line]
    assert line.split("#")[1].split("; ") == [" network_dim = 8 (a.toml:3)", "note"]
    assert YAML(typ="safe").load(text) == {
        "model": {"name_or_path": "x"},
        "data": {"sources": [{"path": "a: #", "repeats": 2}, {"path": "b"}]},
        "lora": {"rank": 8},
        "train": {"epochs": 3},
    }


def test_a_comment_is_one_short_line() -> None:
    setting = Setting("a\nb", "x\n# y" * 50, "f" * 300, 1)
    text = recipe_text({"output.name": RecipeValue("n\nm", (setting,), "long" * 100)})
    comment = text.partition("# ")[2].splitlines()[0]
    assert len(comment) <= MAX_COMMENT_LETTERS and YAML(typ="safe").load(text) == {"output": {"name": "n\nm"}}
