"""The kinds that a recipe is of: which family, which adapter, which optimizer, and so which keys its sections have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.schema import ADAPTERS, OPTIMIZERS, AdapterSection, OptimSection, Recipe, recipe_class

FAMILY, ADAPTER, OPTIMIZER = ("model", "family"), ("lora", "type"), ("optim", "optimizer")


@dataclass(frozen=True)
class Kinds:
    """The kinds of a recipe.

    Attributes:
        registry: the families there are.
        family: of the base model.
        adapter: section of the adapter.
        optimizer: section of the optimizer.
        unknown: keys that name a kind that does not exist; the default is taken in its place.
    """

    registry: Registry
    family: FamilySpec
    adapter: type[AdapterSection]
    optimizer: type[OptimSection]
    unknown: frozenset[tuple[str, str]] = frozenset()

    @property
    def recipe(self) -> type[Recipe]:
        """The class of such recipes."""
        return recipe_class(self.family, self.adapter, self.optimizer)

    def choices(self, key: tuple[str | int, ...]) -> tuple[str, ...]:
        """The names that a key which names a kind can have; empty for every other key."""
        tables = {FAMILY: self.registry.names, ADAPTER: tuple(ADAPTERS), OPTIMIZER: tuple(OPTIMIZERS)}
        return next((names for named, names in tables.items() if named == key), ())


def kinds_of(data: Any, registry: Registry = PRODUCT) -> Kinds:
    """The kinds that recipe data names, or the default ones.

    Args:
        data: sections by name, of unchecked values; a section may be a section object already.
        registry: the families there are.
    """
    families = {spec.name: spec for spec in registry}
    tables: dict[tuple[str, str], Mapping[str, Any]] = {FAMILY: families, ADAPTER: ADAPTERS, OPTIMIZER: OPTIMIZERS}
    names = {key: _named(data, key) for key in tables}
    known = {key: name if isinstance(name, str) and name in tables[key] else None for key, name in names.items()}
    family, adapter, optimizer = (table[known[key] or next(iter(table))] for key, table in tables.items())
    unknown = frozenset(key for key in tables if known[key] is None and names[key] is not None)
    return Kinds(registry, family, adapter, optimizer, unknown)


def recipe_from(data: Any, registry: Registry = PRODUCT) -> Recipe:
    """A recipe of data that a program wrote: the sections by name, as ``Recipe.model_dump`` gives them.

    Raises:
        pydantic.ValidationError: the data is no recipe.
    """
    return kinds_of(data, registry).recipe.model_validate(data)


def _named(data: Any, key: tuple[str, str]) -> Any:
    section = data.get(key[0]) if isinstance(data, dict) else None
    return section.get(key[1]) if isinstance(section, dict) else getattr(section, key[1], None)
