"""The keys of a recipe as input fields, generated from the schema classes, so that no key can be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.explain import shown
from lora_rocm.recipe.family_rules import TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.kinds import Kinds
from lora_rocm.recipe.recipe_text import written
from lora_rocm.recipe.reference import Schema, ref_name, schema_of
from lora_rocm.recipe.suggest import unit_of
from lora_rocm.recipe.value_edit import block_text
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, parse_yaml

FieldKind = Literal["choice", "value", "text", "texts", "yaml"]
"""Kind of input.

value: a number, or another short value as in the recipe. texts: one text per line. yaml: lists of sections.
"""
SIMPLE = (
    "model.family",
    "model.name_or_path",
    "data.path",
    "data.sources",
    "data.trigger_word",
    "data.resolution",
    "data.max_length",
    "lora.rank",
    "optim.optimizer",
    "optim.learning_rate",
    "train.max_train_steps",
    "train.epochs",
    "train.batch_size",
    "sample.prompts",
    "sample.every_n_steps",
    "sample.every_n_epochs",
    "output.save_every_n_steps",
    "output.save_every_n_epochs",
    "output.save_every_minutes",
    "output.name",
)
"""The keys that most users set. A family reads about 14 of them, and those that replace one."""
IN_PLACE_OF: Mapping[str, str] = {
    "data.sources": "data.path",
    "sample.every_n_epochs": "sample.every_n_steps",
    "output.save_every_n_epochs": "output.save_every_n_steps",
    "output.save_every_minutes": "output.save_every_n_steps",
}
"""Keys of ``SIMPLE`` that most users only set in place of another one of them."""
EXCLUSIVE = (
    ("train.max_train_steps", "train.epochs"),
    ("train.validation_every_n_steps", "train.validation_every_n_epochs"),
    ("sample.every_n_steps", "sample.every_n_epochs"),
    ("output.save_every_n_steps", "output.save_every_n_epochs"),
)
"""Pairs of keys of which a recipe has only one, and of which each is one value."""
OF_TEXTS: Mapping[str, str] = {
    "data.repeats": "Number of times that each text is seen per epoch.",
    "data.loss_weight": "Factor by which the loss of each text is multiplied.",
    "data.include": "If given, use only texts that match one of these patterns, written as for exclude.",
    "data.path": "A folder of texts (for a table, or for several, use sources).",
    "data.sources": "Tables and folders of texts, each with its own options.",
    "data.validation_split": "Share of the texts held out for the validation loss.",
    "sample.prompts": "Prompts that the model answers in the previews; empty means no previews. "
    "Write {prompt: ...} for a text with -- in it.",
    "sample.seed": "Seed of the first answer; it increases by one per answer.",
    "sample.steps": "Greatest number of tokens of each answer.",
    "timeouts.cache": "Caching one text or prompt.",
    "timeouts.preview": "One round of previews.",
}
"""Meanings of keys for a family that trains on texts, where the general one speaks of images."""
UNITS: Mapping[str, str] = {
    "data.resolution": "pixels",
    "data.bucket_step": "pixels",
    "sample.width": "pixels",
    "sample.height": "pixels",
    "data.max_length": "tokens",
    "train.max_train_steps": "optimizer updates",
}
"""Units of keys if their names do not contain one."""
BOOLEANS = ("true", "false")
NUMBERS = ("integer", "number")
MAX_SHOWN = 120


@dataclass(frozen=True)
class RecipeField:
    """A key of a recipe as a field.

    Attributes:
        section: its section.
        name: its name in the section.
        kind: kind of input.
        meaning: its description.
        unit: unit of its value; empty if it has none.
        default: the value that a recipe without the key has, as text; empty if there is none.
        choices: its valid values, if they can be listed.
        limits: its lowest and highest value as text; empty if it has none.
        may_resume: whether it may change when a run is resumed.
        needed: whether a recipe must have it.
        one_is_text: whether a single line is a text, not a list with one.
        multiple: number of which it has to be a multiple, or None.
        most: the highest value that a slider offers, or None if it has no slider.
    """

    section: str
    name: str
    kind: FieldKind
    meaning: str
    unit: str = ""
    default: str = ""
    choices: Sequence[str] = ()
    limits: str = ""
    may_resume: bool = False
    needed: bool = False
    one_is_text: bool = False
    multiple: int | None = None
    most: int | None = None

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.name}"

    @property
    def excluded(self) -> str:
        """The dotted key that a recipe cannot have in addition to this one; empty if there is none."""
        pair = next((pair for pair in EXCLUSIVE if self.key in pair), ())
        return next((key for key in pair if key != self.key), "")

    def fitting(self, value: object) -> RecipeField:
        """Return the field for a value. A list with mappings is edited as YAML."""
        is_plain = not isinstance(value, list | dict) or all(isinstance(each, str) for each in value)
        return self if self.kind != "texts" or is_plain else replace(self, kind="yaml")

    def value_of(self, text: str) -> tuple[Any, str]:
        """Return the value that a user typed, as JSON, and the spelling of a number.

        A text that is not of the field's type is returned as text, so that ``check`` names the fault.

        Raises:
            YamlSyntaxError: the text is not YAML, in a field of the kind "yaml".
        """
        if self.kind == "texts":
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[0] if self.one_is_text and len(lines) == 1 else lines, ""
        plain = text.strip()
        if self.kind == "text":
            return plain, ""
        if self.kind == "yaml":
            return parse_yaml(text).value, ""
        try:
            tree = parse_yaml(plain)
        except YamlSyntaxError:
            return plain, ""
        if tree.problems or isinstance(tree.value, dict):
            return plain, ""
        is_number = isinstance(tree.value, int | float) and not isinstance(tree.value, bool)
        return tree.value, plain if is_number else ""

    def text_of(self, value: object, spelling: str = "") -> str:
        """Return a value of a recipe as the text in this field. ``spelling``: how the recipe writes a number."""
        if value is None:
            return ""
        if spelling:
            return spelling
        if self.kind == "texts" and isinstance(value, list) and all(isinstance(each, str) for each in value):
            return "\n".join(" ".join(each.split()) for each in value)
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return written(value)
        if isinstance(value, list) and not any(isinstance(each, list | dict | str) for each in value):
            return written(value)
        return block_text(value).rstrip()


@dataclass(frozen=True)
class FieldSection:
    """A section of a recipe. meaning: its description."""

    name: str
    meaning: str
    fields: Sequence[RecipeField]


def field_sections(kinds: Kinds) -> tuple[FieldSection, ...]:
    """Return all sections of a recipe of these kinds, with all keys that its family reads."""
    schema, sections = schema_of(kinds)
    found = []
    for name, reference in schema["properties"].items():
        section = sections[ref_name(reference)]
        needed = section.get("required", ())
        fields = [
            _field(kinds, name, key, value, key in needed)
            for key, value in section["properties"].items()
            if reads(kinds.family, name, key)
        ]
        found.append(FieldSection(name, _plain(section.get("description", "")), tuple(fields)))
    return tuple(found)


def simple_fields(sections: Sequence[FieldSection]) -> tuple[RecipeField, ...]:
    """Return the fields that most users set."""
    known = {field.key: field for section in sections for field in section.fields}
    return tuple(known[key] for key in SIMPLE if key in known)


def reads(spec: FamilySpec, section: str, key: str) -> bool:
    """Whether a family reads a key of a section that all families share."""
    if section == "lora" and key == TEXT_KEY:
        return bool(spec.text_components)
    if section == "lora" and key == TOKENS_KEY:
        return bool(spec.embedding_keys)
    return f"{section}.{key}" not in spec.unread


def _field(kinds: Kinds, section: str, name: str, schema: Schema, needed: bool) -> RecipeField:
    dotted = f"{section}.{name}"
    variants = _variants(schema)
    choices = kinds.choices((section, name)) or _choices(variants)
    default = schema.get("default")
    if not default and isinstance(default, list | dict):
        default = None
    is_side = dotted in ("data.bucket_step", "sample.width", "sample.height")
    return RecipeField(
        section,
        name,
        "choice" if choices else _kind(variants),
        (kinds.family.trains_on_texts and OF_TEXTS.get(dotted)) or _plain(schema.get("description", "")),
        UNITS.get(dotted, "") or ("seconds" if section == "timeouts" else _unit(name, variants)),
        "" if default is None else written(default) if isinstance(default, bool | int | float) else _short(default),
        tuple(choices),
        _limits(variants),
        schema.get("resume") == "may change",
        needed,
        {variant.get("type") for variant in variants} == {"string", "array"},
        kinds.family.axes.multiple_px if is_side else None,
        128 if dotted == "lora.rank" else None,
    )


def _short(value: object) -> str:
    return value if isinstance(value, str) else shown(value, MAX_SHOWN)


def _variants(schema: Schema) -> list[Schema]:
    """Return the schemas of all types that a value may have, without null."""
    variants = schema.get("anyOf") or schema.get("oneOf") or [schema]
    flat = [
        part
        for variant in variants
        for part in (_variants(variant) if "anyOf" in variant or "oneOf" in variant else [variant])
    ]
    return [variant for variant in flat if variant.get("type") != "null"]


def _choices(variants: Sequence[Schema]) -> Sequence[str]:
    """Return the valid values, if each type lists its own; else nothing."""
    found: list[str] = []
    for variant in variants:
        if variant.get("type") == "boolean":
            found += BOOLEANS
        elif "const" in variant or "enum" in variant:
            found += [str(each) for each in variant.get("enum", [variant.get("const")])]
        else:
            return ()
    return found


def _kind(variants: Sequence[Schema]) -> FieldKind:
    kinds = {str(variant.get("type", "object")) for variant in variants}
    if kinds <= {"string"} and not any("enum" in variant or "const" in variant for variant in variants):
        return "text"
    if kinds <= {*NUMBERS, "string", "boolean"}:
        return "value"
    lists = [variant for variant in variants if variant.get("type") == "array"]
    items = [
        part for variant in lists for part in _variants(variant.get("items") or variant.get("prefixItems", [{}])[0])
    ]
    is_of_texts = any(item.get("type") == "string" for item in items)
    if lists and is_of_texts and all("$ref" in i or i.get("type") == "string" for i in items) and "object" not in kinds:
        return "texts"
    if items and all(item.get("type") in NUMBERS for item in items) and kinds <= {*NUMBERS, "array"}:
        return "value"
    return "yaml"


def _unit(name: str, variants: Sequence[Schema]) -> str:
    """Return the unit that a key's name contains; empty for keys that are not numbers."""
    if not any(variant.get("type") in NUMBERS for variant in variants):
        return ""
    units = sorted(unit_of(name))
    is_count = name.startswith("gradient_") or name == "steps"
    is_factor = name.endswith("_ratio") and not any(
        variant.get("exclusiveMaximum", variant.get("maximum")) == 1 for variant in variants
    )
    return "" if is_count or is_factor or len(units) != 1 else units[0]


def _limits(variants: Sequence[Schema]) -> str:
    """Return the lowest and highest value as text. Limits that only catch typing errors are omitted."""
    for variant in variants:
        if variant.get("type") not in NUMBERS:
            continue
        low, above = variant.get("minimum"), variant.get("exclusiveMinimum")
        high, below = variant.get("maximum"), variant.get("exclusiveMaximum")
        parts = [f">= {low:g}" if low is not None else f"> {above:g}" if above is not None else ""]
        most = high if high is not None else below
        if most is not None and most <= 100_000:
            parts.append(f"{'<=' if high is not None else '<'} {most:g}")
        return ", ".join(part for part in parts if part)
    return ""


def _plain(text: str) -> str:
    """Return a description's first paragraph without the marks of code."""
    return " ".join(text.partition("\n\n")[0].replace("``", "").replace("`", "").split())
