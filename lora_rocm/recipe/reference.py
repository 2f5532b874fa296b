"""The recipe's JSON Schema and its reference page, both made from the schema classes.

``python -m lora_rocm.recipe.reference`` writes the page (docs/recipe.md) to standard output.
"""

from __future__ import annotations

import sys
from typing import Any

from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.peer_names import ADVICE, SAME_VALUE

HEAD = """# The recipe

Every key of a recipe. This page is made from `lora_rocm/recipe/schema.py`; do not edit it
(`python -m lora_rocm.recipe.reference > docs/recipe.md`).

A recipe is YAML: sections with keys. Only `model.name_or_path`, one of `data.path` and `data.sources`, and one of
`train.max_train_steps` and `train.epochs` have to be given. Relative paths start where the command runs; the path of
a `base` starts at the file that names it. `--set section.key=value` on the command line overrides a key.
Keys marked *resume* may change when a run is resumed.

| key | type | meaning |
|---|---|---|
| `base` | text | Another recipe that this one starts from (one level). Sections are merged, lists are replaced. |
"""
NAMES_HEAD = """## Names in other trainers

What kohya's sd-scripts and its GUI, OneTrainer, ai-toolkit, SimpleTuner, diffusers' examples, diffusion-pipe and
musubi-tuner call these keys. Their files are not read yet: start from `recipes/sdxl.yaml`. A learning rate near 1 is
meant for Prodigy or D-Adaptation; with `adamw` write 1.0e-4. Where they leave a key out, their own default holds:
kohya, OneTrainer and ai-toolkit take alpha 1, and kohya trains the text encoders too.

| here | elsewhere |
|---|---|"""
TYPE_NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false"}
LIMITS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
    "multipleOf": "a multiple of",
}


def json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a recipe file, for editors.

    With ``base`` nothing is required, since the base may give it. ``resume: may change`` is an annotation.
    """
    schema = kinds_of({}).recipe.model_json_schema()
    sections = schema.pop("$defs")
    required = schema.pop("required")
    needed = {name: sections[_ref(schema["properties"][name])].pop("required", []) for name in required}
    for value in schema["properties"].values():
        value.pop("default", None)  # a section's defaults stand at its keys
    base = {"type": "string", "description": "Another recipe that this one starts from (one level)."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "lora-rocm recipe",
        "properties": {"base": base, **schema["properties"]},
        "if": {"not": {"required": ["base"]}},
        "then": {
            "required": required,
            "properties": {name: {"required": keys} for name, keys in needed.items() if keys},
        },
        "$defs": sections,
    }


def reference_page() -> str:
    """Markdown: a table for each section and one for the entries of ``data.sources``."""
    schema = json_schema()
    parts = [HEAD]
    for name, value in schema["properties"].items():
        if name != "base":
            parts.append(_table(name, schema["$defs"][_ref(value)]))
    parts.append(_table("data.sources[]", schema["$defs"]["DataSource"]))
    parts.append(_names_table())
    return "\n".join(parts)


def _names_table() -> str:
    """Names of other trainers: by our key, and in alphabetical order those that want more than another name."""
    by_key: dict[str, list[str]] = {}
    for name, key in SAME_VALUE.items():
        by_key.setdefault(key, []).append(f"`{name}`")
    by_sentence: dict[str, list[str]] = {}
    for name, sentence in sorted(ADVICE.items()):
        by_sentence.setdefault(sentence, []).append(f"`{name}`")
    return "\n".join([
        NAMES_HEAD,
        *(f"| `{key}` | {', '.join(names)} |" for key, names in by_key.items()),
        "",
        "| name elsewhere | here |",
        "|---|---|",
        *(f"| {', '.join(names)} | {sentence} |" for sentence, names in by_sentence.items()),
        "",
    ])  # fmt: skip


def _ref(value: dict[str, Any]) -> str:
    """Name of the section that a property refers to."""
    return str(value["$ref"]).rpartition("/")[2]


def _table(title: str, section: dict[str, Any]) -> str:
    lines = [f"## {title}", "", section["description"], "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, value in section["properties"].items():
        meaning = value.get("description", "The default is that of `data`." if title == "data.sources[]" else "")
        if value.get("resume"):
            meaning += " *resume*"
        lines.append(f"| `{name}` | {_type(value)} | {_default(value)} | {meaning.strip()} |")
    return "\n".join(lines) + "\n"


def _type(value: dict[str, Any]) -> str:
    if "anyOf" in value:
        return " or ".join(_type(part) for part in value["anyOf"] if part.get("type") != "null")
    if "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array":
        items = value.get("items") or value.get("prefixItems", [{}])[0]
        most = f", at most {value['maxItems']:,}" if "items" in value and "maxItems" in value else ""
        return ("list of sections" if "$ref" in items else f"list of {_type(items)}") + most
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
