"""Read every valid value of a recipe, and check the rules over several keys with these values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lora_rocm.recipe.rule import ALL, EACH, OPTIONAL, Breach, Parts, RecipeRule, names_of, parts_of
from lora_rocm.recipe.sections import Section
from lora_rocm.recipe.yaml_tree import MAX_PROBLEMS, Key

if TYPE_CHECKING:
    from lora_rocm.families.spec import FamilySpec

FAMILY: Key = ("model", "family")


@dataclass(frozen=True)
class Values:
    """The values of a recipe that could be read.

    Attributes:
        written: the sections as given by the user, not validated.
        defaults: default of every key of these kinds, by key without list indices.
        read: value of every key that is valid or has its default. As in ``RecipeRule.keys``, a list of sections has its
            length as value, an optional section whether it is given, and the family its spec.
    """

    written: Mapping[str, Any]
    defaults: Mapping[Key, Any]
    read: Mapping[Key, Any]


@dataclass(frozen=True)
class Broken:
    """A broken rule, with the key at which it is reported and the filled-in texts of the problem and its fix.

    keys: the keys that the rule reads. If it reads all entries of a list, the key is the list.
    """

    rule: RecipeRule
    key: Key
    what: str
    fix: str
    keys: tuple[Key, ...] = ()


def values_of(recipe: Section, spec: FamilySpec, written: Mapping[str, Any], failed: Collection[Key] = ()) -> Values:
    """Return the values of a valid recipe, except the keys in ``failed`` and all keys below them."""
    reader = _ValueReader(frozenset(failed))
    reader.section(type(recipe), vars(recipe), (), validated=True)
    return reader.values(type(recipe), spec, written)


def readable(cls: type[Section], spec: FamilySpec, written: Mapping[str, Any], failed: Collection[Key]) -> Values:
    """Return the readable values of an invalid recipe.

    Unknown keys, keys in ``failed`` and all keys below them are omitted.

    Args:
        cls: recipe class.
        spec: the recipe's family.
        written: unvalidated sections by name.
        failed: keys with an error.
    """
    reader = _ValueReader(frozenset(failed))
    reader.section(cls, written, (), validated=False)
    return reader.values(cls, spec, written)


@dataclass
class _ValueReader:
    failed: frozenset[Key]
    read: dict[Key, Any] = field(default_factory=dict)

    def values(self, cls: type[Section], spec: FamilySpec, written: Mapping[str, Any]) -> Values:
        if FAMILY in self.read:
            self.read[FAMILY] = spec
        return Values(written, keys_of(cls), self.read)

    def section(self, cls: type[Section], given: Mapping[str, Any], key: Key, validated: bool) -> None:
        """Read the keys of a section.

        Args:
            cls: the section's class.
            given: the given values by name.
            key: the section's key.
            validated: whether the given values come from a validated section object.
        """
        for name, (info, inner) in _fields(cls).items():
            child = (*key, name)
            is_raw = name in given and not validated
            value = given[name] if name in given else info.get_default(call_default_factory=True)
            if child in self.failed or value is PydanticUndefined:
                continue
            if inner is None:
                if not any(each[: len(child)] == child for each in self.failed):
                    self._leaf(cls, child, value, is_raw)
            elif not inner.many:
                if inner.optional:
                    self.read[child] = value is not None
                self._below(inner.cls, value, child)
            elif isinstance(value, list | tuple):
                self.read[child] = len(value)
                for number, item in enumerate(value):
                    self._below(inner.cls, item, (*child, number))

    def _below(self, cls: type[Section], value: object, key: Key) -> None:
        if key in self.failed:
            return
        if isinstance(value, Section):
            self.section(type(value), vars(value), key, validated=True)
        elif isinstance(value, dict):
            self.section(cls, value, key, validated=False)

    def _leaf(self, cls: type[Section], key: Key, value: object, is_raw: bool) -> None:
        if is_raw:
            try:
                value = _adapter(cls, str(key[-1])).validate_python(value)
            except ValidationError:  # the validation of the whole recipe reports it
                return
        self.read[key] = value


@cache
def _adapter(cls: type[Section], name: str) -> TypeAdapter[Any]:
    info = cls.model_fields[name]
    annotated: Any = Annotated[(info.annotation, *info.metadata, None)]  # None: Annotated needs some metadata
    return TypeAdapter(annotated)


@dataclass(frozen=True)
class _Inner:
    """Type of a field that contains sections.

    Attributes:
        cls: the section's class.
        optional: whether the section may be None.
        many: whether the field is a list of sections.
    """

    cls: type[Section]
    optional: bool = False
    many: bool = False


@cache
def _fields(cls: type[Section]) -> Mapping[str, tuple[FieldInfo, _Inner | None]]:
    fields: dict[str, tuple[FieldInfo, _Inner | None]] = {}
    for name, info in cls.model_fields.items():
        annotation: Any = info.annotation
        fields[name] = info, _section_of(annotation)
    return fields


@cache
def _section_of(annotation: Any) -> _Inner | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return _Inner(annotation)
    parts = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType) and len(parts) == 2 and type(None) in parts:
        found = _section_of(next(part for part in parts if part is not type(None)))
        return found and _Inner(found.cls, optional=True)
    if get_origin(annotation) is tuple and parts[1:] == (Ellipsis,):
        found = _section_of(parts[0])
        return found and _Inner(found.cls, many=True)
    return None


@cache
def keys_of(cls: type[Section]) -> Mapping[Key, Any]:
    """Return the default of every key below a section, by key without list indices."""

    def below(section: type[Section], key: Key) -> Iterator[tuple[Key, Any]]:
        for name, (info, inner) in _fields(section).items():
            yield (*key, name), info.get_default(call_default_factory=True)
            if inner is not None:
                yield from below(inner.cls, (*key, name))

    return dict(below(cls, ()))


def broken_rules(rules: Iterable[RecipeRule], values: Values, *, of_file: bool = False) -> list[Broken]:
    """Check the rules, skipping those with a key that could not be read. Return at most MAX_PROBLEMS breaches.

    Args:
        rules: the rules to check.
        values: the recipe's values.
        of_file: whether a user wrote ``values.written``. Rules with ``unless_written`` are checked only then.
    """
    found = (each for rule in rules for each in _breaches(rule, values, of_file))
    return list(islice(dict.fromkeys(found), MAX_PROBLEMS))


def _breaches(rule: RecipeRule, values: Values, of_file: bool) -> Iterator[Broken]:
    if rule.unless_written and (
        not of_file or any(_is_written(parts_of(key), values.written) for key in rule.unless_written)
    ):
        return
    indices = [None] if rule.each is None else range(values.read.get(rule.each, 0))
    for index in indices:
        given = _given(rule, index, values)
        if given is None:
            continue
        if rule.only_if_set and given[0] == values.defaults[rule.names[0]]:
            continue
        found = rule.broken(*given)
        breaches: Sequence[Breach] = [{}] * found if isinstance(found, bool) else found
        for words in breaches:
            at = str(words.get("at", rule.at))
            place = _at(parts_of(at), index) if at else _place([_at(key, index) for key in rule.parts], values.written)
            keys = tuple(_at(parts[: parts.index(ALL)] if ALL in parts else parts, index) for parts in rule.parts)
            yield Broken(rule, place, rule.what.format(*given, **words), rule.fix.format(*given, **words), keys)


def _given(rule: RecipeRule, index: int | None, values: Values) -> list[Any] | None:
    """Return the values of a rule's keys, or None if a key could not be read or does not exist in these kinds.

    Args:
        rule: the rule.
        index: the list entry for which the rule is checked, or None if it is checked once.
        values: the recipe's values.
    """
    found = list[Any]()
    for key, parts in zip(rule.keys, rule.parts, strict=True):
        if ALL in parts:
            place = parts.index(ALL)
            count = values.read.get(parts[:place])
            if count is None:
                return None
            entries = [(*parts[:place], number, *parts[place + 1 :]) for number in range(count)]
            if not all(one in values.read for one in entries):
                return None
            found.append(tuple(values.read[one] for one in entries))
        elif (one := _at(parts, index)) in values.read:
            found.append(values.read[one])
        elif key.endswith(OPTIONAL) and names_of(parts) not in values.defaults:
            found.append(None)
        else:
            return None
    return found


def _at(parts: Parts, index: int | None) -> Key:
    """Return the key with its EACH replaced by ``index``, the list entry for which a rule is checked."""
    if index is None or EACH not in parts:
        return parts
    return tuple(index if part == EACH else part for part in parts)


def _place(keys: Sequence[Key], written: Mapping[str, Any]) -> Key:
    """Return the key that is written last in the recipe.

    If none of the keys is written, return the section that contains all of them.
    """
    given = [key for key in keys if _is_written(key, written)]
    if given:
        return max(given, key=lambda key: _order(key, written))
    shared = 0
    while all(len(key) > shared and key[: shared + 1] == keys[0][: shared + 1] for key in keys):
        shared += 1
    return keys[0][:shared]


def _is_written(key: Key, written: Any) -> bool:
    for part in key:
        if isinstance(written, Section):
            written = {name: getattr(written, name) for name in written.model_fields_set}
        if isinstance(part, int):
            if not isinstance(written, list | tuple) or part >= len(written):
                return False
        elif not isinstance(written, Mapping) or part not in written:
            return False
        written = written[part]
    return True


def _order(key: Key, written: Any) -> tuple[int, ...]:
    """Return the position of a written key, for sorting: its index within each section that contains it."""
    numbers = list[int]()
    for part in key:
        below: Any = vars(written) if isinstance(written, Section) else written
        numbers.append(part if isinstance(part, int) else list(below).index(part))
        written = below[part]
    return tuple(numbers)
