"""JSON Schema and reference page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from pydantic import Field

from lora_rocm.recipe.adapter_sections import ADAPTERS, AdapterSection
from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.reference import json_schema, reference_page
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import all_keys
from tests.families.toy_families import TOYS
from tests.wording import phrase

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


@pytest.fixture(scope="module")
def page() -> str:
    return reference_page()


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def test_the_page_in_docs_is_current(page: str) -> None:
    assert PAGE.read_text(encoding="utf-8") == page, "run python -m lora_rocm.recipe.reference"


def test_every_key_is_on_the_page(page: str) -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys(kinds_of({}).recipe) if "." in key}
    assert not [leaf for leaf in leaves if f"| `{leaf}` |" not in page]


def test_schema_requires_nothing_with_a_base(schema: dict[str, Any]) -> None:
    assert schema["$schema"].endswith("2020-12/schema")
    assert "required" not in schema and schema["if"] == {"not": {"required": ["base"]}}
    assert schema["then"]["required"] == ["model", "data", "train"]
    assert schema["then"]["properties"]["model"]["required"] == ["name_or_path"]
    assert [name for name, section in schema["$defs"].items() if "required" in section] == [
        "ModuleOverride",
        "NewToken",
        "PreviewPrompt",
    ]


def test_schema_describes_every_section_and_refuses_unknown_keys(schema: dict[str, Any]) -> None:
    assert set(schema["properties"]) == {"base", *Recipe.model_fields}
    assert all(section["additionalProperties"] is False for section in schema["$defs"].values())
    assert schema["additionalProperties"] is False


class ToyAdapter(AdapterSection):
    """An adapter for tests."""

    type: Literal["toy"] = Field("toy", description="Kind of adapter.")
    rank: int = Field(4, gt=0, description="Rank of the update.")
    toys: int = Field(1, description="Of a toy.")


@pytest.fixture(scope="module")
def toy_adapter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cast(dict[str, type[AdapterSection]], ADAPTERS), "toy", ToyAdapter)
        yield


@pytest.fixture(scope="module")
def toy_schema(toy_adapter: None) -> dict[str, Any]:
    return json_schema(TOYS)


def fits(value: Any, schema: Any, root: dict[str, Any]) -> bool:
    """Whether a schema takes a value, as far as our schemas say something about keys."""
    if isinstance(schema, bool):
        return schema
    rules = [
        "$ref" not in schema or fits(value, root["$defs"][schema.get("$ref", "").rpartition("/")[2]], root),
        "const" not in schema or value == schema["const"],
        "not" not in schema or not fits(value, schema["not"], root),
        "anyOf" not in schema or any(fits(value, each, root) for each in schema["anyOf"]),
        all(fits(value, each, root) for each in schema.get("allOf", ())),
        "multipleOf" not in schema or not isinstance(value, int) or value % schema["multipleOf"] == 0,
        "type" not in schema or schema["type"] != "object" or isinstance(value, dict),
    ]
    if "if" in schema:
        rules.append(fits(value, schema.get("then" if fits(value, schema["if"], root) else "else", True), root))
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rules.append(set(schema.get("required", ())) <= set(value))
        rules += [fits(value[key], known[key], root) for key in known if key in value]
        rules.append(schema.get("additionalProperties", True) or set(value) <= set(known))
    return all(rules)


GOOD: dict[str, Any] = {"model": {"name_or_path": "x"}, "data": {"path": "p"}, "train": {"max_train_steps": 1}}
TEXT = {"model": {"family": "toy-text", "name_or_path": "x"}}


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"lora": {"use_dora": True}}, True),
        ({"lora": {"type": "lora", "use_dora": True}}, True),
        ({"lora": {"type": "toy", "toys": 2}}, True),
        ({"lora": {"type": "toy", "use_dora": True}}, False),
        ({"lora": {"toys": 2}}, False),  # without a type: lora
        ({"lora": {"type": "none"}}, False),
        ({"base": "b.yaml", "lora": {"toys": 2}}, True),  # the base may name the type
        ({"base": "b.yaml", "lora": {"toyz": 2}}, False),
        ({"objective": {"min_snr_gamma": 5}}, True),
        ({"objective": {"label_smoothing": 0.1}}, False),
        ({"objective": {"label_smoothing": 0.1}, **TEXT}, True),
        ({"objective": {"min_snr_gamma": 5}, **TEXT}, False),
        ({"base": "b.yaml", "objective": {"label_smoothing": 0.1}}, True),
        ({"model": {"name_or_path": "x", "vae": "v"}}, True),
        ({"model": {"family": "toy-text", "name_or_path": "x", "vae": "v"}}, False),
        ({"model": {"family": "toy-text"}}, False),
        ({"data": {"path": "p", "bucket_step": 12}}, False),
        ({"data": {"path": "p", "bucket_step": 16}}, True),
        ({"data": {"path": "p", "resolution": 64}, **TEXT}, False),
        ({"lora": {"train_text_encoder": True}, **TEXT}, False),
    ],
)
def test_schema_knows_the_keys_of_each_kind(toy_schema: dict[str, Any], changes: dict[str, Any], good: bool) -> None:
    assert fits(GOOD | changes, toy_schema, toy_schema) is good


def test_page_shows_the_keys_of_each_kind(toy_adapter: None) -> None:
    page = reference_page(TOYS)
    shared, lora, toy = (
        page.index(f"{heading}\n") for heading in ("## lora", "### lora.type: lora", "### lora.type: toy")
    )
    assert shared < page.index(phrase("recipe/toy-lora-kind-of-adapter")) < page.index("| `alpha` |") < lora
    assert lora < page.index("| `use_dora` |") < toy < page.index("| `toys` |") < page.index("## optim")
    assert "### objective with model.family: toy-text" in page and "and 1 (Toy text)" in page
    assert page.count("| `name_or_path` |") == len(TOYS.names)  # described by each family in its own words
