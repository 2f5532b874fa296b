"""The recipe keys that a fork may change, with the values of its parent, as fields to be filled in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.recipe.fork_keys import WHY_FIXED, why_fixed
from lora_rocm.recipe.kinds import kinds_of
from lora_rocm.recipe.recipe_fields import RecipeField, field_sections
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, value_at

USUAL = (
    "optim.learning_rate",
    "optim.lr_scheduler",
    "train.max_train_steps",
    "lora.dropout",
    "sample.prompts",
    "sample.every_n_steps",
)
"""The keys that most forks change."""


@dataclass(frozen=True)
class ForkField:
    """A key that a fork may change. value: the parent's value as text in this field."""

    field: RecipeField
    value: str


@dataclass(frozen=True)
class ForkValues:
    """The fields of a fork.

    Attributes:
        usual: the keys that most forks change.
        more: the other ones by section.
        fixed: why the keys of a section, or single keys, cannot change.
    """

    usual: Sequence[ForkField]
    more: Mapping[str, Sequence[ForkField]]
    fixed: Mapping[str, str]

    @property
    def fields(self) -> dict[str, ForkField]:
        """Each field by its dotted key."""
        found = [*self.usual, *(each for fields in self.more.values() for each in fields)]
        return {each.field.key: each for each in found}

    def overrides(self, texts: Mapping[str, str]) -> list[str]:
        """Return the ``section.key=value`` settings of the fields that were changed.

        Args:
            texts: the text of each field by its key; other keys are ignored. An empty text is null, or an empty list.

        Raises:
            UserError: not-yaml: a text is not YAML, in a field with a list of sections.
        """
        found = []
        for key, each in self.fields.items():
            text = texts.get(key, each.value).replace("\r\n", "\n").strip()
            if text == each.value.strip():
                continue
            try:
                value, spelling = each.field.value_of(text) if text else (None, "")
            except YamlSyntaxError as error:
                raise UserError("not-yaml", f"This is not valid YAML: {error}", where=key, fix=error.fix) from None
            value = [] if value is None and each.field.kind == "texts" else value
            found.append(f"{key}={spelling or json.dumps(value, ensure_ascii=False)}")
        return found


def fork_values(parent: Recipe, registry: FamilyRegistry = FAMILIES) -> ForkValues:
    """Return the fields for a fork of a run with this recipe."""
    data = parent.model_dump(mode="json")
    usual, more = dict[str, ForkField](), dict[str, list[ForkField]]()
    for section in field_sections(kinds_of(data, registry)):
        for field in section.fields:
            if why_fixed(field.key):
                continue
            value = value_at(data, (field.section, field.name))
            fitting = field.fitting(value)
            found = ForkField(fitting, fitting.text_of(value))
            if field.key in USUAL:
                usual[field.key] = found
            else:
                more.setdefault(section.name, []).append(found)
    return ForkValues([usual[key] for key in USUAL if key in usual], more, WHY_FIXED)
