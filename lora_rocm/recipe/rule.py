"""A rule over several keys of a recipe, as data. ``recipe/key_rules`` has the table; ``recipe/judge.py`` checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

Breach = Mapping[str, object]
"""The words of one breach that fill in the rule's texts. "at", if present, replaces ``RecipeRule.at``."""
EACH, ALL, OPTIONAL = "[each]", "[all]", "?"
Parts = tuple[str | int, ...]
"""A key like ``yaml_tree.Key``, except that a list index may also be EACH or ALL."""


@cache
def parts_of(key: str) -> Parts:
    """Split a key: ``data.sources[0].path`` becomes ("data", "sources", 0, "path").

    ``[each]`` and ``[all]`` stay as they are.
    """
    parts: list[str | int] = []
    for part in key.removesuffix(OPTIONAL).split("."):
        name, bracket, rest = part.partition("[")
        place = bracket + rest
        parts += [name, *([place if place in (EACH, ALL) else int(rest.removesuffix("]"))] if bracket else [])]
    return tuple(parts)


def names_of(parts: Parts) -> tuple[str, ...]:
    """Return a key without list indices, such as ("data", "sources", "path")."""
    return tuple(part for part in parts if isinstance(part, str) and part not in (EACH, ALL))


@dataclass(frozen=True)
class RecipeRule:
    """A rule about the values of several keys. It is checked only if all these values could be read.

    Attributes:
        id: short name that never changes.
        keys: dotted keys that the rule reads; it can read no others. With ``data.sources[each].path``, the rule is
            checked once per entry of the list. With ``data.sources[all].path``, the value is a tuple with all entries'
            values. A list of sections has its length as value, an optional section whether it is given, and
            ``model.family`` its ``FamilySpec``. A key that ends in ``?`` may be missing in some kinds, and its value is
            then None.
        broken: takes the values of ``keys`` in their order. Returns whether the rule is broken, or one breach per
            fault.
        what: the problem, as a format string for the values ({0}, {1}) and the words of the breach.
        fix: the remedy, as a format string like ``what``.
        at: key at which the problem is reported. If empty, the key written last, or else the section with all keys.
        only_if_set: whether the rule is checked only if the first key differs from its default.
        unless_written: keys that switch the rule off if any is written. Such a rule is checked for recipe files only.
    """

    id: str
    keys: tuple[str, ...]
    broken: Callable[..., bool | Sequence[Breach]]
    what: str
    fix: str
    at: str = ""
    only_if_set: bool = False
    unless_written: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> tuple[Parts, ...]:
        """Each of ``keys``, split into its parts."""
        return tuple(map(parts_of, self.keys))

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """``parts`` without list indices."""
        return tuple(map(names_of, self.parts))

    @cached_property
    def each(self) -> Parts | None:
        """Key of the list with entries for which the rule is checked one by one; None if it is checked once."""
        lists = {parts[: parts.index(EACH)] for parts in self.parts if EACH in parts}
        assert len(lists) < 2, self.id
        return next(iter(lists), None)

    def reads(self, key: str) -> bool:
        """Return whether the rule reads a key, such as "data.sources[0].path", or any key of a section ("data")."""
        asked = names_of(parts_of(key))
        return any(names[: len(asked)] == asked for names in self.names)


def leaf(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def not_both(first: str, second: str) -> RecipeRule:
    """Return a rule against setting both of two alternative keys of a section."""
    return RecipeRule(
        f"not-both:{first},{leaf(second)}",
        (first, second),
        lambda first, second: bool(first) and bool(second),
        f"give only one of {leaf(first)} and {leaf(second)}",
        f"Remove one of them: {leaf(first)} or {leaf(second)}.",
    )


def exactly_one(first: str, second: str, *unless: str) -> tuple[RecipeRule, RecipeRule]:
    """Return rules that require exactly one of two keys in a section.

    If a key in ``unless`` is given, neither is required.
    """
    what, keys = f"give exactly one of {leaf(first)} and {leaf(second)}", (first, second, *unless)
    return (
        RecipeRule(
            f"neither:{first},{leaf(second)}",
            keys,
            lambda *values: not any(values),
            what,
            f"Add {leaf(first)} or {leaf(second)}.",
        ),
        RecipeRule(
            f"both:{first},{leaf(second)}",
            keys,
            lambda first, second, *others: bool(first) and bool(second) and not any(others),
            what,
            f"Remove one of them: {leaf(first)} or {leaf(second)}.",
        ),
    )


def no_effect(key: str, others: Sequence[str], when: Callable[..., bool], why: str, fix: str) -> RecipeRule:
    """Return a rule against a key that has no effect in a certain case. The key's default is always accepted.

    Args:
        key: the key without effect.
        others: the keys that determine the case.
        when: takes the values of ``others``; returns whether the key has no effect.
        why: reason, as a format string in which {1} is the value of the first of ``others``.
        fix: remedy, as a format string like ``why``.
    """
    return RecipeRule(
        f"no-effect:{key},{leaf(others[0])}",
        (key, *others),
        lambda _, *values: when(*values),
        f"has no effect {why}",
        fix,
        at=key,
        only_if_set=True,
    )
