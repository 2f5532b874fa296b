"""The kinds of a recipe (family, adapter, optimizer). They determine which keys its sections have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.adapter_sections import ADAPTERS, AdapterSection
from lora_rocm.recipe.optim_sections import ARGUMENTS_KEY, OPTIMIZERS, OptimSection
from lora_rocm.recipe.peer_names import peer_names
from lora_rocm.recipe.schema import Recipe, recipe_class
from lora_rocm.recipe.sections import Section
from lora_rocm.recipe.suggest import MAX_KEY_LETTERS, alike
from lora_rocm.recipe.yaml_tree import dotted

FAMILY, ADAPTER, OPTIMIZER = ("model", "family"), ("lora", "type"), ("optim", "optimizer")
NAMED_BY = (FAMILY, ADAPTER, OPTIMIZER)
"""Keys that name a kind. The value of each determines which keys its section has."""


@dataclass(frozen=True)
class Kinds:
    """The kinds of a recipe.

    Attributes:
        registry: the available families.
        family: family of the base model.
        adapter: class of the ``lora`` section.
        optimizer: class of the ``optim`` section.
        unknown: kind keys without a usable value, so that their default is used. The value is unknown, or the recipe
            writes the key under another name (such as ``optimizer_type``).
    """

    registry: FamilyRegistry
    family: FamilySpec
    adapter: type[AdapterSection]
    optimizer: type[OptimSection]
    unknown: frozenset[tuple[str, str]] = frozenset()

    @property
    def recipe(self) -> type[Recipe]:
        """The recipe class with the sections of these kinds."""
        return recipe_class(self.registry, self.family, self.adapter, self.optimizer)

    def choices(self, key: tuple[str | int, ...]) -> tuple[str, ...]:
        """Return the valid values of a key that names a kind; empty for any other key."""
        tables = {FAMILY: self.registry.names, ADAPTER: tuple(ADAPTERS), OPTIMIZER: tuple(OPTIMIZERS)}
        return next((names for named, names in tables.items() if named == key), ())

    def name_of(self, section: str) -> str:
        """Return the recipe's name for this kind of section, such as "lora" or "adamw"."""
        if section == ADAPTER[0]:
            return next(name for name, found in ADAPTERS.items() if found is self.adapter)
        if section == OPTIMIZER[0]:
            return next(name for name, found in OPTIMIZERS.items() if found is self.optimizer)
        return self.family.name

    def judges(self, key: tuple[str | int, ...]) -> bool:
        """Return whether an error at ``key`` can be reported although the kind of its section may be unknown.

        This is possible if the kind is known, if all kinds have the key, or if no kind has it.
        """
        named_by = kind_key(str(key[0])) if len(key) > 1 else None
        if named_by is None or named_by not in self.unknown:
            return True
        section, name = str(key[0]), str(key[1])
        kinds = every_kind(named_by[0], self.registry)
        if name == ARGUMENTS_KEY:
            return False  # the intended optimizer, which is unknown, defines its arguments
        have_it = [name in each.section(section).model_fields for each in kinds]
        return all(have_it) or not any(have_it)

    @property
    def unjudged(self) -> frozenset[tuple[str, ...]]:
        """Keys that no rule may read: keys with an unknown kind, and keys that only some of the possible kinds have."""
        sections = [name for name in self.recipe.model_fields if kind_key(name) in self.unknown]
        keys = {(name, each) for name in sections for each in self.section(name).model_fields}
        return self.unknown | {key for key in keys if not self.judges(key)}

    def owners(self, section: str, key: str) -> str:
        """Return the kinds that have a key in their section, such as "optim.optimizer: adamw"; empty if none has it."""
        named_by = kind_key(section)
        if named_by is None:
            return ""
        kinds = every_kind(named_by[0], self.registry)
        names = [each.name_of(named_by[0]) for each in kinds if key in each.section(section).model_fields]
        return f"{'.'.join(named_by)}: {' or '.join(names)}" if names else ""

    def section(self, name: str) -> type[Section]:
        """Return the class of a section of this recipe."""
        found = self.recipe.model_fields[name].annotation
        assert isinstance(found, type) and issubclass(found, Section)
        return found


def kind_key(section: str) -> tuple[str, str] | None:
    """Return the key that names the kind of a section, or None if the section has only one kind."""
    return FAMILY if section == "objective" else next((key for key in NAMED_BY if key[0] == section), None)


def every_kind(section: str, registry: FamilyRegistry = FAMILIES) -> list[Kinds]:
    """Return one ``Kinds`` for each possible kind of a section, the default first.

    Other sections have their default kind.

    For a section with only one kind, the list contains just the defaults.
    """
    default = kinds_of({}, registry)
    if section == FAMILY[0]:
        return [replace(default, family=spec) for spec in registry]
    if section == ADAPTER[0]:
        return [replace(default, adapter=adapter) for adapter in ADAPTERS.values()]
    if section == OPTIMIZER[0]:
        return [replace(default, optimizer=optimizer) for optimizer in OPTIMIZERS.values()]
    return [default]


def kinds_of(data: Any, registry: FamilyRegistry = FAMILIES) -> Kinds:
    """Return the kinds named in recipe data, with the default for each kind that is not named.

    Args:
        data: unvalidated sections by name; a section may already be a section object.
        registry: the available families.
    """
    families = {spec.name: spec for spec in registry}
    tables: dict[tuple[str, str], Mapping[str, Any]] = {FAMILY: families, ADAPTER: ADAPTERS, OPTIMIZER: OPTIMIZERS}
    names = {key: _named(data, key) for key in tables}
    known = {key: name if isinstance(name, str) and name in tables[key] else None for key, name in names.items()}
    family, adapter, optimizer = (table[known[key] or next(iter(table))] for key, table in tables.items())
    kinds = Kinds(registry, family, adapter, optimizer)
    others = _names_of_no_key(data, kinds.recipe)
    unknown = frozenset(
        key
        for key in tables
        if known[key] is None and (names[key] is not None or any(_is_given_as(*each, key) for each in others))
    )
    return replace(kinds, unknown=unknown)


def recipe_from(data: Any, registry: FamilyRegistry = FAMILIES) -> Recipe:
    """Build a recipe from data written by this program, with sections by name as in ``Recipe.model_dump``.

    Raises:
        pydantic.ValidationError: the data is not a valid recipe.
    """
    return kinds_of(data, registry).recipe.model_validate(data)


def _names_of_no_key(data: object, recipe: type[Recipe]) -> list[tuple[str, str]]:
    """Return (section, name) for each name in the data that is not a key of this recipe class.

    A valid recipe has none.
    """
    found = []
    for name, section in data.items() if isinstance(data, dict) else ():
        field = recipe.model_fields.get(name) if isinstance(name, str) else None
        keys = getattr(field.annotation, "model_fields", {}) if field is not None else {}
        if isinstance(section, dict):
            found += [(name, str(each)) for each in section if each not in keys]
    return found


def _is_given_as(section: str, name: str, key: tuple[str, str]) -> bool:
    """Whether a name in a section probably means ``key``: it is another trainer's name for it, or a misspelling."""
    plain = name.lower().replace("-", "_")
    near = section == key[0] and len(plain) <= MAX_KEY_LETTERS and alike(plain, key[1])
    return near or peer_names().same_value.get(plain) == dotted(key)


def _named(data: Any, key: tuple[str, str]) -> Any:
    section = data.get(key[0]) if isinstance(data, dict) else None
    return section.get(key[1]) if isinstance(section, dict) else getattr(section, key[1], None)
