"""Values are changed in the text of a recipe; everything else stays."""

from __future__ import annotations

import pytest

from lora_rocm.recipe.load import shipped_recipes
from lora_rocm.recipe.recipe_text import RecipeText, Value, written
from lora_rocm.recipe.yaml_tree import parse_yaml

TEXT = """\
# What it is for.

model:
  # The base.
  name_or_path: some/model   # <-- change it:
                             #     a longer remark

data:
  sources:
    - dataset: rows.jsonl    # <-- a table
  max_length: 512

output:
  name: x
"""


def test_a_value_is_changed_and_the_rest_stays() -> None:
    text = RecipeText(TEXT)
    text.set("model", "name_or_path", "C:\\Modelle\\ä b.safetensors", "from --model")
    text.set("data", "dataset", "other.jsonl", "from --texts")
    text.set("data", "validation_split", 0.1, "why")
    text.set("runtime", "memory", "auto", "because")
    lines = str(text).splitlines()
    assert lines[:4] == TEXT.splitlines()[:4] and "a longer remark" not in str(text)
    assert lines[4] == "  name_or_path: C:\\Modelle\\ä b.safetensors  # from --model"
    tree = parse_yaml(str(text))
    assert tree.value == {
        "model": {"name_or_path": "C:\\Modelle\\ä b.safetensors"},
        "data": {"sources": [{"dataset": "other.jsonl"}], "max_length": 512, "validation_split": 0.1},
        "runtime": {"memory": "auto"},
        "output": {"name": "x"},
    }
    assert text.number_of("output", "name") == len(lines) and text.number_of("output", "missing") == 0
    assert list(tree.value) == ["model", "data", "runtime", "output"]


def test_a_key_replaces_another() -> None:
    text = RecipeText(TEXT)
    text.set("data", "path", "texts", "a folder", instead_of="dataset")
    assert parse_yaml(str(text)).value["data"]["sources"] == [{"path": "texts"}]
    assert text.name_of("data", "path") == "data.sources[0].path" and text.name_of("data", "x") == "data.x"


def test_marked_lines_are_listed_without_comments() -> None:
    text = RecipeText(TEXT)
    assert text.marked() == [(5, "name_or_path: some/model"), (10, "- dataset: rows.jsonl")]
    text.set("model", "name_or_path", "mine", "given")
    assert text.marked() == [(9, "- dataset: rows.jsonl")]


@pytest.mark.parametrize("path", shipped_recipes().values(), ids=lambda path: path.stem)
def test_a_shipped_recipe_keeps_its_bytes(path: object) -> None:
    content = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert str(RecipeText(content)) == content


@pytest.mark.parametrize(
    "value",
    [
        "a/b", "a b", "it's", "a: b", "a #b", "- x", "true", "null", "12", "1e5", "0x1f", "2026-01-01", "", " x ", "[x",
        "a,b", "{x}", "ä\\ü", "~/x", "*x", "&x", "!x", "x:", "\t", "a\nb", '"', "@x", "%x", "yes", "é\u0301", "\x85",
        1, 0, 2.5, True, False, ["x", ".txt"], ["a,b", "c d"],
    ],
)  # fmt: skip
def test_a_written_value_reads_back(value: Value) -> None:
    line = written(value)
    assert "\n" not in line
    assert parse_yaml(f"key: {line}  # why").value == {"key": value}
