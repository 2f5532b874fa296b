"""The table of all rules over several keys of a recipe, and a lookup of rules by key."""

from __future__ import annotations

from functools import cache

from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.family_rules import FAMILY_RULES, rules_of_spec
from lora_rocm.recipe.key_rules import (
    adapter_rules,
    data_rules,
    model_rules,
    objective_rules,
    optim_rules,
    preview_rules,
    run_rules,
)
from lora_rocm.recipe.rule import RecipeRule

RULES: tuple[RecipeRule, ...] = (
    *model_rules.RULES,
    *data_rules.RULES,
    *objective_rules.RULES,
    *optim_rules.RULES,
    *adapter_rules.RULES,
    *run_rules.RULES,
    *preview_rules.RULES,
    *FAMILY_RULES,
)
"""The rules that do not depend on the family. A rule is skipped for a recipe that lacks one of its keys."""


@cache
def rules_for(spec: FamilySpec) -> tuple[RecipeRule, ...]:
    """Return the rules for recipes of a family."""
    return (*RULES, *rules_of_spec(spec), *spec.rules)


def rules_of(key: str, registry: FamilyRegistry = FAMILIES) -> tuple[RecipeRule, ...]:
    """Return the rules of all families that read a key ("data.sources[0].path") or any key of a section ("data")."""
    found = {rule.id: rule for spec in registry for rule in rules_for(spec) if rule.reads(key)}
    return tuple(found.values())
