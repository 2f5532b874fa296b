"""The kinds that a recipe is of: which family, which adapter, which optimizer, and so which keys its sections have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.schema import ADAPTERS, OPTIMIZERS, AdapterSection, OptimSection, Recipe, Section, recipe_class

FAMILY, ADAPTER, OPTIMIZER = ("model", "family"), ("lora", "type"), ("optim", "optimizer")
NAMED_BY = (FAMILY, ADAPTER, OPTIMIZER)
"""Keys that name a kind: which keys their section has is decided by them."""


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

    def name_of(self, section: str) -> str:
        """The name of this kind of section, as a recipe has it."""
        if section == ADAPTER[0]:
            return next(name for name, found in ADAPTERS.items() if found is self.adapter)
        if section == OPTIMIZER[0]:
            return next(name for name, found in OPTIMIZERS.items() if found is self.optimizer)
        return self.family.name

    def owners(self, section: str, key: str) -> list[str]:
        """The other kinds that have a key in a section, each as "optim.optimizer: adamw"."""
        named_by = {"objective": FAMILY}.get(section) or next((k for k in NAMED_BY if k[0] == section), None)
        if named_by is None:
            return []
        return [
            f"{'.'.join(named_by)}: {kinds.name_of(named_by[0])}"
            for kinds in every_kind(named_by[0], self.registry)
            if key in kinds.section(section).model_fields
        ]

    def section(self, name: str) -> type[Section]:
        """The class of the section that a kind decides about."""
        found = self.recipe.model_fields[name].annotation
        assert isinstance(found, type) and issubclass(found, Section)
        return found


def every_kind(section: str, registry: Registry = PRODUCT) -> list[Kinds]:
    """The default kinds with each that the section can have, the default first; of other sections the default alone."""
    default = kinds_of({}, registry)
    if section == FAMILY[0]:
        return [replace(default, family=spec) for spec in registry]
    if section == ADAPTER[0]:
        return [replace(default, adapter=adapter) for adapter in ADAPTERS.values()]
    if section == OPTIMIZER[0]:
        return [replace(default, optimizer=optimizer) for optimizer in OPTIMIZERS.values()]
    return [default]


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
