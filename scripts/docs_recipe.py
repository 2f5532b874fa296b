"""The reference of the recipe: one page per section, and the page of names in other trainers.

A section with several kinds (families, adapters, optimizers) has one table for all kinds. A key is a row, with the
kinds that have it and the default of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.family_rules import SIDES, TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.kinds import FAMILY, NAMED_BY, every_kind, kinds_of
from lora_rocm.recipe.peer_names import advice, peer_names
from lora_rocm.recipe.reference import Schema, ref_name, schema_of, schema_of_section
from lora_rocm.recipe.schema import MOVED
from lora_rocm.recipe.yaml_tree import dotted
from scripts.docs_tables import table

TYPE_NAMES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "object": "mapping",
}
LIMITS = {
    "exclusiveMinimum": ">",
    "minimum": ">=",
    "exclusiveMaximum": "<",
    "maximum": "<=",
}
ENTRIES = {
    "data.sources": "DataSource",
    "lora.overrides": "ModuleOverride",
    "lora.new_tokens": "NewToken",
    "sample.prompts": "PreviewPrompt",
}
"""Key with a separate table for its entries -> their section."""
WIDE = "---\nhide:\n  - toc\n---\n\n"
"""Front matter of a page with wide tables: the site hides its table of contents."""
GENERAL = {
    "model": "The base model.",
    "lora": "The adapter.",
    "optim": "Optimizer and schedule. Steps are optimizer updates.",
    "objective": "The training objective.",
}
"""Descriptions of sections that have several kinds."""
KIND_NAMES = {"model": "families", "objective": "families", "lora": "types", "optim": "optimizers"}
HEAD = """\
# The recipe

A recipe is YAML: sections with keys. Each section has its page:

{sections}

Only these keys are required: `model.name_or_path`, one of `data.path` and `data.sources`, and one of
`train.max_train_steps` and `train.epochs`.

- **Paths.** A relative path starts where the command runs. The path of a `base` starts at the file that names it (of a
  link to a recipe: at the link, then at the file).
- **Command line.** `--set section.key=value` overrides a key.
- **Resume.** Keys marked *resume* may change when a run is resumed.
- **Keys without effect.** A key that does nothing without another one, such as `sample.every_n_steps` without
  `sample.prompts`, is an error if the other one is not given. If that is given and off (`prompts: []`), the key is kept
  and named.
- **Editors.** `lora-rocm schema` writes the JSON Schema with which an editor completes and checks a recipe.
- **Other trainers.** [Names in other trainers](../kohya-names.md) lists their names of these keys.

These pages are generated from the classes of the recipe: `python -m scripts.docs_pages`.

## base

| key | type | meaning |
| --- | --- | --- |
| `base` | text | Another recipe that this one starts from (one level). Sections are merged, lists are replaced. |

## Keys that have moved

The old place is still read, with a notice.

{moved}
"""
NAMES_HEAD = """\
# kohya names, and names of other trainers

Search this page for the name that you know, such as `network_alpha`. A recipe that has it gets the same advice from
`lora-rocm check`. The page has the names of kohya's sd-scripts and its GUI, OneTrainer, ai-toolkit,
SimpleTuner, diffusers' examples, diffusion-pipe and musubi-tuner, and for language models of LLaMA-Factory, Axolotl
and TRL.

`lora-rocm import` [translates a whole configuration](../how-to/moving-over-index.md). Defaults differ:

- kohya, OneTrainer and ai-toolkit use alpha 1 by default; here alpha is the rank.
- kohya trains the text encoders too; here `lora.train_text_encoder` is off.
- Captions end at 75 tokens there by default (`max_token_length`); here the text encoders of SDXL read 225.
- Without a `weight_decay` Prodigy, D-Adaptation, Adafactor, CAME, Lion and schedule-free AdamW have none there, and
  0.01 here.
- A learning rate near 1 is meant for Prodigy or D-Adaptation. With `adamw` write 1.0e-4.

[What differs from other trainers](../how-to/other-trainers.md) has the rest.

## Same value, another name

"""
ADVICE_HEAD = """
## Another value, or no such key

"""


@dataclass(frozen=True)
class Row:
    """A key as some kinds of a section have it, with its default in each."""

    key: str
    schema: Schema
    defaults: Mapping[str, str]


def pages(registry: FamilyRegistry = FAMILIES) -> dict[str, str]:
    """File name -> page. The index comes first."""
    schema, sections = schema_of(kinds_of({}, registry))
    named_by = {**{key[0]: key for key in NAMED_BY}, "objective": FAMILY}
    found = {}
    for name, value in schema["properties"].items():
        if name in named_by:
            text = _page_of_kinds(name, named_by[name], registry)
        else:
            section = sections[ref_name(value)]
            keys = _table(name, section["properties"], registry)
            text = f"{WIDE}# Recipe: {name}\n\n{_plain(section['description'])}\n\n{keys}\n"
        entries = [(key, sections[entry]) for key, entry in ENTRIES.items() if key.startswith(f"{name}.")]
        found[f"{name}.md"] = "\n".join([text, *(_entry(key, entry, sections, registry) for key, entry in entries)])
    listed = "\n".join(f"- [{name.removesuffix('.md')}]({name}): {_about(text)}" for name, text in found.items())
    moved = table(("key", "old place"), ((f"`{dotted(new)}`", f"`{dotted(old)}`") for old, new in MOVED.items()))
    return {"index.md": HEAD.format(sections=listed, moved=moved), **found}


def _about(text: str) -> str:
    """The first sentence of a page."""
    return text.removeprefix(WIDE).split("\n\n")[1].split("\n")[0]


def _page_of_kinds(name: str, named_by: tuple[str, str], registry: FamilyRegistry) -> str:
    """A page with one table of the keys of all kinds of a section."""
    kinds = {kind.name_of(named_by[0]): schema_of_section(kind, name)[1] for kind in every_kind(named_by[0], registry)}
    rows = _merged(name, kinds)
    what = KIND_NAMES[name]
    titles = {
        kind: registry[kind].title if what == "families" else _own_words(section["description"], name)
        for kind, section in kinds.items()
    }
    listed = "\n".join(f"- `{kind}`{title and ': '}{title}" for kind, title in titles.items())
    first = {row.key: row for row in reversed(rows)}
    body = table(
        ("key", "type", "default", "meaning", what),
        (
            (
                f"{_anchor(row.key) if first[row.key] is row else ''}`{row.key}`",
                f"one of the {what} above" if (name, row.key) == named_by else _type(row.schema),
                _one_default(row.defaults),
                _meaning(name, row.key, row.schema, registry),
                _of(row.defaults, kinds),
            )
            for row in rows
        ),
    )
    head = f"{WIDE}# Recipe: {name}\n\n{GENERAL[name]}\n"
    intro = f"Its keys depend on `{'.'.join(named_by)}`. The {what}:\n\n{listed}\n"
    return "\n".join([head, intro, "## Keys\n", body, ""])


def _own_words(description: str, section: str) -> str:
    """A description without the words that all kinds share."""
    words = _plain(description)
    for sentence in GENERAL[section].split(". "):
        words = words.replace(sentence.rstrip(".") + ".", "").replace(f"{sentence.rstrip('.')}: ", "")
    return words.strip()


def _merged(name: str, kinds: Mapping[str, Schema]) -> list[Row]:
    """The keys of all kinds in the order of the first that has each; one row for those that mean the same."""
    found: dict[tuple[str, str], tuple[Schema, dict[str, str]]] = {}
    order: list[str] = []
    for kind, section in kinds.items():
        at = 0
        for key, value in section["properties"].items():
            if key in order:
                at = order.index(key) + 1
            else:
                order.insert(at, key)
                at += 1
            if key == dict(NAMED_BY).get(name):  # the key that names the kind: its default is the first kind
                value = {"description": value["description"], "default": next(iter(kinds))}
            same = json.dumps({part: value[part] for part in value if part != "default"}, sort_keys=True)
            _, defaults = found.setdefault((key, same), (value, {}))
            defaults[kind] = _default(value)
    rows = [Row(key, value, defaults) for (key, _), (value, defaults) in found.items()]
    return sorted(rows, key=lambda row: order.index(row.key))


def _one_default(defaults: Mapping[str, str]) -> str:
    """The default; if it differs, each with the kinds that have it."""
    by_value: dict[str, list[str]] = {}
    for kind, value in defaults.items():
        by_value.setdefault(value, []).append(f"`{kind}`")
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(f"{value or 'none'} ({', '.join(kinds)})" for value, kinds in by_value.items())


def _of(defaults: Mapping[str, str], kinds: Mapping[str, object]) -> str:
    """The kinds that have a key, in as few words as possible."""
    if len(defaults) == len(kinds):
        return "all"
    without = [f"`{kind}`" for kind in kinds if kind not in defaults]
    having = [f"`{kind}`" for kind in defaults]
    return f"all but {', '.join(without)}" if len(without) < len(having) else ", ".join(having)


def _entry(key: str, section: Schema, sections: Mapping[str, Schema], registry: FamilyRegistry) -> str:
    """The table of the entries of a list. Keys of ``data`` are listed in a sentence."""
    own, same = {}, []
    parent = key.partition(".")[0]
    for name, value in section["properties"].items():
        if "description" in value:
            own[name] = value
        else:
            same.append(f"[`{name}`](#{name})")
    text = f"## {key}\n\n{_plain(section['description'])}\n\n{_table(key, own, registry, anchors=False)}\n"
    return text + (f"\nAn entry may also have these keys of `{parent}`: {', '.join(same)}.\n" if same else "")


def _table(section: str, properties: Mapping[str, Schema], registry: FamilyRegistry, anchors: bool = True) -> str:
    return table(
        ("key", "type", "default", "meaning"),
        (
            (
                f"{_anchor(name) if anchors else ''}`{name}`",
                _type(value),
                _default(value),
                _meaning(section, name, value, registry),
            )
            for name, value in properties.items()
        ),
    )


def _anchor(key: str) -> str:
    return f'<a id="{key}"></a>'


def _meaning(section: str, key: str, value: Schema, registry: FamilyRegistry) -> str:
    """The meaning of a key, the families that read it, and whether a resume may change it."""
    parts = [_plain(value.get("description", ""))]
    parent = section.partition(".")[0]
    if (section, key) in SIDES:
        sides: dict[int, list[str]] = {}
        for spec in (spec for spec in registry if _reads(spec, parent, key)):
            sides.setdefault(spec.axes.multiple_px, []).append(spec.title)
        named = "; ".join(f"{side} for {', '.join(titles)}" for side, titles in sides.items())
        parts.append(f"A multiple of {next(iter(sides)) if len(sides) == 1 else named}.")
    reading = [spec.name for spec in registry if _reads(spec, parent, key)]
    if 0 < len(reading) < len(registry.names) and section not in ("model", "objective"):
        parts.append(f"Families: {_of(dict.fromkeys(reading, ''), dict.fromkeys(registry.names))}.")
    if not reading:
        parts.append("No family reads it yet.")
    if value.get("resume"):
        parts.append("*resume*")
    return " ".join(part for part in parts if part)


def _reads(spec: FamilySpec, section: str, key: str) -> bool:
    """Whether a family reads a key of a section that all families share."""
    if section == "lora" and key == TEXT_KEY:
        return bool(spec.text_components)
    if section == "lora" and key == TOKENS_KEY:
        return bool(spec.embedding_keys)
    return f"{section}.{key}" not in spec.unread


def names_page() -> str:
    """The page of names in other trainers, in alphabetical order, with our keys."""
    same = sorted(peer_names().same_value.items())
    by_sentence: dict[str, list[str]] = {}
    for name, sentence in sorted(advice().items()):
        by_sentence.setdefault(sentence, []).append(f"`{name}`")
    return (
        NAMES_HEAD
        + table(("elsewhere", "here"), ((f"`{name}`", _linked(key)) for name, key in same))
        + "\n"
        + ADVICE_HEAD
        + table(("elsewhere", "here"), ((", ".join(names), sentence) for sentence, names in by_sentence.items()))
        + "\n"
    )


def _linked(key: str) -> str:
    """A key with a link to its place on its page."""
    section, _, rest = key.partition(".")
    return f"[`{key}`](recipe/{section}.md{f'#{rest}' if rest else ''})"


def _type(value: Schema) -> str:
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


def _default(value: Schema) -> str:
    if "default" not in value:
        return "required"
    default: Any = value["default"]
    if default is None:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default}`" if default not in ("", []) else "empty"


def _plain(text: str) -> str:
    """A docstring's text as one paragraph of Markdown."""
    return " ".join(text.replace("``", "`").split())
