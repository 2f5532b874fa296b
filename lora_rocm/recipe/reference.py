"""The recipe's JSON Schema, generated from the schema classes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import BaseModel

from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.recipe.family_rules import SIDES, TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.kinds import FAMILY, NAMED_BY, Kinds, every_kind, kinds_of

Schema = dict[str, Any]


def json_schema(registry: FamilyRegistry = FAMILIES) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file, for editors.

    If the file has ``base``, no key is required, because the base recipe may set it, even a key that names a kind.
    ``resume: may change`` is an annotation.
    """
    # sections of the default kinds; their required keys depend on `base`
    default = kinds_of({}, registry)
    schema, sections = schema_of(default)
    required = schema.pop("required")
    needed = {name: sections[ref_name(schema["properties"][name])].pop("required", []) for name in required}
    for value in schema["properties"].values():
        value.pop("default", None)  # the keys have the defaults
    # alternatives for the other kinds
    then = {name: {"required": keys} for name, keys in needed.items() if keys}
    for section, key in NAMED_BY:
        refs = _sections_of_kinds(section, registry, sections)
        if len(refs) > 1:
            schema["properties"][section] = {"anyOf": refs}
            unnamed = {"if": {"not": {"required": [key]}}, "then": refs[0]}
            then[section] = {**then.get(section, {}), **unnamed}
    objectives = [rules["properties"]["objective"] for rules in _rules_of_families(registry, sections).values()]
    if len(objectives) > 1:
        schema["properties"]["objective"] = {"anyOf": objectives}
    base = {"type": "string", "description": "Another recipe that this one starts from (one level)."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "lora-rocm recipe",
        "properties": {"base": base, **schema["properties"]},
        "if": {"not": {"required": ["base"]}},
        "then": {"required": required, "properties": then},
        "allOf": _conditions(registry, sections),
        "$defs": sections,
    }


def schema_of(kinds: Kinds) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema of a recipe class and the schemas of its sections by name. The caller may change both."""
    schema = json.loads(_generated(kinds.recipe))  # json: a record that this process made
    return schema, schema.pop("$defs")


def schema_of_section(kinds: Kinds, section: str) -> tuple[str, Schema]:
    """Return name and schema of one section, as in the recipe's schema. The caller may change the schema.

    This avoids the schema of the whole recipe, which takes a tenth of a second and would be needed once per kind.
    """
    model = kinds.recipe.model_fields[section].annotation
    assert isinstance(model, type) and issubclass(model, BaseModel)
    schema = json.loads(_generated(model))  # json: a record that this process made
    schema.pop("$defs", None)
    return model.__name__, schema


@cache
def _generated(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema())


def _sections_of_kinds(section: str, registry: FamilyRegistry, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Return references to the section of each kind, the default first, and add the schemas to ``sections``."""
    refs = []
    for kinds in every_kind(section, registry):
        name, schema = schema_of_section(kinds, section)
        sections.setdefault(name, {key: value for key, value in schema.items() if key != "required"})
        refs.append({"$ref": f"#/$defs/{name}"})
    return refs


def _rules_of_families(registry: FamilyRegistry, sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each family's own rules for sections that all families share, by family name."""
    rules = {}
    for kinds in every_kind(FAMILY[0], registry):
        spec = kinds.family
        objective, schema = schema_of_section(kinds, "objective")
        sections.setdefault(objective, schema)
        keys: dict[str, dict[str, Any]] = {}
        for section, key in SIDES:
            keys.setdefault(str(section), {})[str(key)] = {"multipleOf": spec.axes.multiple_px}
        for name in sorted(spec.unread):
            section, _, key = name.partition(".")
            keys.setdefault(section, {})[key] = False
        if not spec.text_components:
            keys.setdefault("lora", {})[TEXT_KEY] = {"const": False}
        if not spec.embedding_keys:
            keys.setdefault("lora", {})[TOKENS_KEY] = {"maxItems": 0}
        shared = {section: {"properties": known} for section, known in keys.items()}
        rules[spec.name] = {"properties": {"objective": {"$ref": f"#/$defs/{objective}"}, **shared}}
    return rules


def _conditions(registry: FamilyRegistry, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conditional rules of each family.

    The default family's rules also apply without a base and a family.
    """
    rules = _rules_of_families(registry, sections)
    if len(rules) == 1:
        return list(rules.values())
    section, key = FAMILY
    unnamed = {"not": {"anyOf": [{"required": ["base"]}, {"properties": {section: {"required": [key]}}}]}}
    found = []
    for name, rule in rules.items():
        named = {
            "properties": {section: {"properties": {key: {"const": name}}, "required": [key]}},
            "required": [section],
        }
        found.append({"if": {"anyOf": [named, unnamed]} if name == registry.names[0] else named, "then": rule})
    return found


def ref_name(value: Schema) -> str:
    """Return the name of the section that a property references."""
    return str(value["$ref"]).rpartition("/")[2]
