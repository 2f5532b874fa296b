"""JSON Schema and reference page."""

from pathlib import Path

from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.reference import json_schema, reference_page
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "run python -m lora_rocm.recipe.reference"


def test_every_key_is_on_the_page() -> None:
    page = reference_page()
    leaves = {key.rpartition(".")[2] for key in all_keys(kinds_of({}).recipe) if "." in key}
    assert not [leaf for leaf in leaves if f"| `{leaf}` |" not in page]


def test_schema_requires_nothing_with_a_base() -> None:
    schema = json_schema()
    assert schema["$schema"].endswith("2020-12/schema")
    assert "required" not in schema and schema["if"] == {"not": {"required": ["base"]}}
    assert schema["then"]["required"] == ["model", "data", "train"]
    assert schema["then"]["properties"] == {"model": {"required": ["name_or_path"]}}
    assert not [name for name, section in schema["$defs"].items() if "required" in section]


def test_schema_describes_every_section_and_refuses_unknown_keys() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == {"base", *Recipe.model_fields}
    assert all(section["additionalProperties"] is False for section in schema["$defs"].values())
    assert schema["additionalProperties"] is False
