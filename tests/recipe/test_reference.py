"""JSON Schema and reference pages."""

import re
from collections.abc import Iterator
from typing import Any, Literal, cast

import pytest
from pydantic import Field

from lora_rocm.recipe.adapter_sections import ADAPTERS, AdapterSection
from lora_rocm.recipe.kinds import every_kind, kinds_of
from lora_rocm.recipe.peer_names import advice, peer_names
from lora_rocm.recipe.reference import json_schema
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import all_keys
from scripts.docs_recipe import names_page, pages
from tests.families.toy_families import TOYS


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def keys_of(page: str) -> list[str]:
    """The keys of all tables of a page, in their order."""
    return re.findall(r"^\| (?:<a id=\"\w+\"></a>)?`(\w+)` \|", page, re.MULTILINE)


def test_every_key_is_on_the_page_of_its_section() -> None:
    found = {name: set(keys_of(page)) for name, page in pages().items()}
    keys = [key for key in all_keys(kinds_of({}).recipe) if "." in key]
    assert len(keys) > 150
    assert [key for key in keys if key.rpartition(".")[2] not in found[f"{key.partition('.')[0]}.md"]] == []


def test_no_section_has_a_key_twice_that_means_the_same() -> None:
    for name, page in pages().items():
        main = re.split(r"\n## (?:data|lora|sample)\.", page)[0]
        rows = [line for line in main.splitlines() if re.match(r"\| .*`\w+` \|", line)]
        without_kinds = [re.sub('<a id="[a-z_0-9]+"></a>', "", line).rsplit(" | ", 1)[0] for line in rows]
        assert len(set(without_kinds)) == len(without_kinds), name


def test_every_name_of_another_trainer_is_on_its_page() -> None:
    page = names_page()
    assert "| `network_alpha` | [`lora.alpha`](recipe/lora.md#alpha) |" in page
    assert [name for name in (*peer_names().same_value, *advice()) if f"`{name}`" not in page] == []


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
    """Whether a schema accepts a value, as far as our schemas constrain keys."""
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


def test_pages_show_the_keys_of_each_kind(toy_adapter: None) -> None:
    found = pages(TOYS)
    lora = [line for line in found["lora.md"].splitlines() if line.startswith("| <a id=")]
    assert [line for line in lora if "`use_dora`" in line and line.endswith("| `lora` |")]
    assert [line for line in lora if "`toys`" in line and line.endswith("| `toy` |")]
    assert "- `toy`: An adapter for tests." in found["lora.md"]
    assert [line for line in lora if "`rank`" in line and "`4`" in line or "`16`" in line]
    (step,) = [line for line in found["data.md"].splitlines() if line.startswith('| <a id="bucket_step">')]
    assert "32 for Toy video" in step and "Families: all but" in step and "`toy-text`" in step
    assert keys_of(found["model.md"]).count("name_or_path") == len({
        kind.recipe.model_fields["model"].annotation.model_fields["name_or_path"].description  # type: ignore[union-attr]
        for kind in every_kind("model", TOYS)
    })  # fmt: skip
