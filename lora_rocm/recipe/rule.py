"""A rule over several keys of a recipe, as data. ``recipe/key_rules`` has the table; ``recipe/judge.py`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

Breach = Mapping[str, object]
"""Words that fill in a rule's texts for one breach. "at": the key of the breach, in place of ``RecipeRule.at``."""
EACH, ALL, OPTIONAL = "[each]", "[all]", "?"
Parts = tuple[str | int, ...]
"""A key like ``yaml_tree.Key``; a list index may be EACH or ALL."""


@cache
def parts_of(key: str) -> Parts:
    """``data.sources[0].path`` -> ("data", "sources", 0, "path"). ``[each]`` and ``[all]`` stay as they are."""
    parts: list[str | int] = []
    for part in key.removesuffix(OPTIONAL).split("."):
        name, bracket, rest = part.partition("[")
        place = bracket + rest
        parts += [name, *([place if place in (EACH, ALL) else int(rest.removesuffix("]"))] if bracket else [])]
    return tuple(parts)


def names_of(parts: Parts) -> tuple[str, ...]:
    """A key without list indices: ("data", "sources", "path")."""
    return tuple(part for part in parts if isinstance(part, str) and part not in (EACH, ALL))


@dataclass(frozen=True)
class RecipeRule:
    """A rule about the values of several keys. It is checked if all these values could be read.

    Attributes:
        id: a short name that never changes.
        keys: the dotted keys that it reads; it can read no others. ``data.sources[each].path``: the rule is checked for
            each entry of the list; ``data.sources[all].path``: a tuple of the values of all entries. The value of a
            list of sections is its length, of an optional section whether it is given, of ``model.family`` its
            ``FamilySpec``. A key ending in ``?`` is None in kinds of a section that lack it.
        broken: takes the values of ``keys`` in their order. True: the rule is broken; a list: broken once per item.
        what: the problem, a format string for the values ({0}, {1}) and the words of the breach.
        fix: the remedy, a format string likewise.
        at: the key at which the problem is reported. Empty: the last written of the given keys, else the section that
            contains them.
        only_if_set: the rule is checked only if the first key differs from its default.
        unless_written: the rule is checked only for recipe files, and only if none of these keys is written there.
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
        """The parts of each of ``keys``."""
        return tuple(map(parts_of, self.keys))

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """``parts`` without list indices."""
        return tuple(map(names_of, self.parts))

    @cached_property
    def each(self) -> Parts | None:
        """The list with the entries that the rule is checked for; None: it is checked once."""
        lists = {parts[: parts.index(EACH)] for parts in self.parts if EACH in parts}
        assert len(lists) < 2, self.id
        return next(iter(lists), None)

    def reads(self, key: str) -> bool:
        """Whether the rule reads a key, such as "data.sources[0].path", or a key of a section, such as "data"."""
        asked = names_of(parts_of(key))
        return any(names[: len(asked)] == asked for names in self.names)


def leaf(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def not_both(first: str, second: str) -> RecipeRule:
    """Two keys of one section that replace each other."""
    return RecipeRule(
        f"not-both:{first},{leaf(second)}",
        (first, second),
        lambda first, second: bool(first) and bool(second),
        f"give only one of {leaf(first)} and {leaf(second)}",
        f"Remove one of them: {leaf(first)} or {leaf(second)}.",
    )


def exactly_one(first: str, second: str, *unless: str) -> tuple[RecipeRule, RecipeRule]:
    """A section needs exactly one of two keys. Neither is needed if one of the keys ``unless`` is given."""
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
    """A key has no effect if ``when``, called with the values of ``others``, is true. Its default is always accepted.

    ``why`` and ``fix`` are format strings: {1} is the value of the first of ``others``.
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
