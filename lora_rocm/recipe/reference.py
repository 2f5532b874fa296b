"""The recipe's JSON Schema and its reference page, generated from the schema classes.

``python -m lora_rocm.recipe.reference`` prints the page (docs/reference/recipe.md) to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.tables import read_table
from lora_rocm.recipe.family_rules import SIDES, TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.kinds import FAMILY, NAMED_BY, Kinds, every_kind, kinds_of
from lora_rocm.recipe.peer_names import advice, peer_names
from lora_rocm.recipe.schema import MOVED
from lora_rocm.recipe.yaml_tree import dotted

Schema = dict[str, Any]
TYPE_NAMES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "object": "mapping",
}
LIMITS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@dataclass(frozen=True)
class PageTexts:
    """The file. ``general``: section that has several kinds -> its description."""

    head: str
    names_head: str
    general: Mapping[str, str]


@cache
def _texts() -> PageTexts:
    return read_table(Path(__file__).with_name("reference.toml"), PageTexts)


def json_schema(registry: Registry = PRODUCT) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file, for editors.

    With ``base`` nothing is required, not even the keys that name kinds, because the base may give them. ``resume: may
    change`` is an annotation.
    """
    default = kinds_of({}, registry)
    schema, sections = _schema_of(default)
    required = schema.pop("required")
    needed = {name: sections[_ref(schema["properties"][name])].pop("required", []) for name in required}
    for value in schema["properties"].values():
        value.pop("default", None)  # the keys have the defaults
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


def _schema_of(kinds: Kinds) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a recipe class, and the schemas of its sections by name; both may be changed."""
    schema = json.loads(_generated(kinds.recipe))
    return schema, schema.pop("$defs")


def _schema_of_section(kinds: Kinds, section: str) -> tuple[str, Schema]:
    """(name, schema) of a section as the recipe's schema has them; the schema may be changed.

    The schema of the whole recipe takes a tenth of a second, and there is one for each kind.
    """
    model = kinds.recipe.model_fields[section].annotation
    assert isinstance(model, type) and issubclass(model, BaseModel)
    schema = json.loads(_generated(model))
    schema.pop("$defs", None)
    return model.__name__, schema


@cache
def _generated(model: type[BaseModel]) -> str:
    return json.dumps(model.model_json_schema())


def _sections_of_kinds(section: str, registry: Registry, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """References to the section of each kind, the default first. Adds their schemas to ``sections``."""
    refs = []
    for kinds in every_kind(section, registry):
        name, schema = _schema_of_section(kinds, section)
        sections.setdefault(name, {key: value for key, value in schema.items() if key != "required"})
        refs.append({"$ref": f"#/$defs/{name}"})
    return refs


def _rules_of_families(registry: Registry, sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Family -> its rules for sections that all families share."""
    rules = {}
    for kinds in every_kind(FAMILY[0], registry):
        spec = kinds.family
        objective, schema = _schema_of_section(kinds, "objective")
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


def _conditions(registry: Registry, sections: dict[str, Any]) -> list[dict[str, Any]]:
    """Conditional rules per family. Those of the default also hold if neither a base nor a family is given."""
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


ENTRIES = {
    "data.sources": "DataSource",
    "lora.overrides": "ModuleOverride",
    "lora.new_tokens": "NewToken",
    "sample.prompts": "PreviewPrompt",
}
"""Key whose entries have a table of their own -> their section."""


def reference_page(registry: Registry = PRODUCT) -> str:
    """The page in Markdown: a table per section, per kind of a section, and of ``ENTRIES``."""
    schema, sections = _schema_of(kinds_of({}, registry))
    named_by = {**{key[0]: ".".join(key) for key in NAMED_BY}, "objective": ".".join(FAMILY)}
    parts = [_texts().head]
    for name, value in schema["properties"].items():
        discriminator = named_by.get(name, "")
        kinds = every_kind(discriminator.partition(".")[0], registry)
        if len(kinds) == 1:
            parts.append(_table(name, sections[_ref(value)], registry))
        else:
            parts += _tables_of_kinds(name, discriminator, kinds, registry)
    parts += [_table(f"{key}[]", sections[entry], registry) for key, entry in ENTRIES.items()]
    parts += [_moved_table(), _names_table()]
    return "\n".join(parts)


def _tables_of_kinds(name: str, discriminator: str, kinds: Sequence[Kinds], registry: Registry) -> Iterator[str]:
    """A table of the keys that all kinds of a section share, then one per kind with its own keys and defaults."""
    found = {}
    for kind in kinds:
        found[kind.name_of(name)] = _schema_of_section(kind, name)[1]
    first = next(iter(found.values()))
    all_have = {
        key: value
        for key, value in first["properties"].items()
        if all(section["properties"].get(key) == value for section in found.values())
    }
    section, _, key = discriminator.partition(".")
    if section == name:
        choices = ", ".join(f"`{choice}`" for choice in found)
        all_have = {key: {**first["properties"][key], "names": choices}, **all_have}
    general = {"description": _texts().general[name], "properties": all_have}
    yield _table(name, general, registry) if all_have else f"## {name}\n\n{_texts().general[name]}\n"
    for choice, of_kind in found.items():
        own = {key: value for key, value in of_kind["properties"].items() if key not in all_have}
        if own:
            heading = f"{discriminator}: {choice}" if section == name else f"{name} with {discriminator}: {choice}"
            yield _table(heading, {**of_kind, "properties": own}, registry, level=3)


def _moved_table() -> str:
    """The old places of keys, which are still read."""
    return "\n".join([
        "## Keys that have moved",
        "",
        "The old place is still read, with a notice.",
        "",
        "| key | old place |",
        "|---|---|",
        *(f"| `{dotted(new)}` | `{dotted(old)}` |" for old, new in MOVED.items()),
        "",
    ])  # fmt: skip


def _names_table() -> str:
    """Names of other trainers by our key, then alphabetically those that need more than another name."""
    by_key: dict[str, list[str]] = {}
    for name, key in peer_names().same_value.items():
        by_key.setdefault(key, []).append(f"`{name}`")
    by_sentence: dict[str, list[str]] = {}
    for name, sentence in sorted(advice().items()):
        by_sentence.setdefault(sentence, []).append(f"`{name}`")
    return "\n".join([
        _texts().names_head,
        *(f"| `{key}` | {', '.join(names)} |" for key, names in by_key.items()),
        "",
        "| name elsewhere | here |",
        "|---|---|",
        *(f"| {', '.join(names)} | {sentence} |" for sentence, names in by_sentence.items()),
        "",
    ])  # fmt: skip


def _ref(value: Schema) -> str:
    """Name of the section that a property references."""
    return str(value["$ref"]).rpartition("/")[2]


def _table(title: str, section: dict[str, Any], registry: Registry, level: int = 2) -> str:
    lines = [
        f"{'#' * level} {title}",
        "",
        section["description"],
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, value in section["properties"].items():
        meaning = value.get("description", "The default is that of `data`." if title == "data.sources[]" else "")
        if (title, name) in SIDES:
            sides = {spec.axes.multiple_px for spec in registry}
            named = " and ".join(f"{spec.axes.multiple_px} ({spec.title})" for spec in registry)
            meaning += f" A multiple of {sides.pop() if len(sides) == 1 else named}."
        if value.get("resume"):
            meaning += " *resume*"
        lines.append(f"| `{name}` | {_type(value)} | {_default(value)} | {meaning.strip()} |")
    return "\n".join(lines) + "\n"


def _type(value: dict[str, Any]) -> str:
    if "names" in value:
        return str(value["names"])
    if kinds := value.get("anyOf", value.get("oneOf")):
        return " or ".join(_type(part) for part in kinds if part.get("type") != "null")
    if "$ref" in value:
        return "section"
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        items = value.get("items") or value.get("prefixItems", [{}])[0]
        most = f", at most {value['maxItems']:,}" if "items" in value and "maxItems" in value else ""
        listed = [
            f"{_type(part)}s" if "$ref" in part else _type(part)
            for part in items.get("anyOf", items.get("oneOf", [items]))
        ]
        return f"list of {' or '.join(listed)}{most}"
    limits = [f"{sign} {_number(value[key])}" for key, sign in LIMITS.items() if key in value and value[key] < 2**31]
    return " ".join([TYPE_NAMES[value["type"]], ", ".join(limits)]).strip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value >= 10_000 else f"{value:g}"


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return "required"
    default = value["default"]
    if default is None:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`" if default not in ("", []) else "empty"


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
    sys.stdout.write(reference_page())
