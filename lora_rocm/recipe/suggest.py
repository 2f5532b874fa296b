"""Suggestions for unknown keys: another trainer's name, a key of another section, or a similar spelling.

Users follow a suggestion, so a wrong one does harm. A key is suggested only if it has the same meaning. Either the
table of other trainers' names has it, or it differs in letters but not in words, numbers or the unit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, get_args

from pydantic import BaseModel

from lora_rocm.recipe.peer_names import PER_EPOCH, advice, peer_names
from lora_rocm.recipe.schema import DataSection, Recipe
from lora_rocm.recipe.source_sections import DataSource

MAX_KEY_LETTERS = 64
ALIKE_JOINED = 0.9  # minimum ratio of two keys without underscores
ALIKE = 0.8  # difflib's ratio of a word and its misspelling exceeds this (lora, rslora: 0.8)
SPEAK_ALONE = frozenset({
    "rank", "alpha", "optimizer", "betas", "epsilon", "epochs", "repeats", "resolution", "targets", "prompts", "vae",
    "threads", "workers", "seed", "device", "deterministic", "graphs", "revision", "family", "upscale", "author",
    "license", "description", "sampler",
})  # fmt: skip
"""One-word keys that have the same meaning in every section."""
NEED_THEIR_SECTION = frozenset({"every_n_steps", "every_n_epochs", "keep_last", "first_step"})
"""Keys of several words that mean something only together with their section."""


def section_class(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation such as ``X``, ``X | None`` or ``tuple[X, ...]``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_class(part))), None)


OF_TABLES_ONLY = frozenset({"split", "image_column"})
"""Options of a source that have no meaning for a folder of images."""


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every key of a recipe class as ``section.key`` in schema order, including the sections themselves.

    Keys below lists of sections and below optional sections are omitted.
    """
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_class(field.annotation)
        if section is not None and isinstance(field.annotation, type):
            yield from all_keys(section, f"{prefix}{name}.")


@cache
def _portable_keys(recipe: type[Recipe]) -> tuple[str, ...]:
    """Return the keys that may be suggested to a user who wrote them in another section."""
    return tuple(key for key in all_keys(recipe) if "." in key and is_portable(key.rpartition(".")[2]))


def is_portable(leaf: str) -> bool:
    """Return whether a key's meaning is clear without its section."""
    return leaf in SPEAK_ALONE if "_" not in leaf else leaf not in NEED_THEIR_SECTION


def suggest(name: str, siblings: list[str], section: str, value: str, recipe: type[Recipe]) -> str:
    """Return a suggestion for an unknown key, as a sentence. If no key is similar, the sentence lists the known keys.

    Args:
        name: the unknown key.
        siblings: the known keys of ``section``.
        section: dotted name of the section that contains the unknown key; empty at the top level.
        value: the value given for the unknown key, formatted for a message.
        recipe: recipe class of these kinds.
    """
    # exact matches: another spelling, another section, another trainer's name
    plain = name.lower().replace("-", "_")
    here = f"{section}." if section else ""
    if plain in siblings:
        return f"Did you mean {here}{plain}?"
    if section == "data" and plain in DataSource.model_fields:
        kind = "dataset" if plain in OF_TABLES_ONLY else "path"
        entry = f"{{{plain}: {value}}}" if plain == "dataset" else f"{{{kind}: ..., {plain}: {value}}}"
        return f"Write data.sources: [{entry}]"
    same_value = peer_names().same_value
    for known in (f"{section.partition('.')[0]}.{plain}", plain):
        if known in same_value:
            return f"Did you mean {_for(same_value[known], siblings, section)}? (Other trainers call it {name}.)"
        if known in advice():
            return advice()[known]
    if len(plain) > MAX_KEY_LETTERS:  # comparing long strings is slow
        return ""
    # similar keys, else the list of known ones
    elsewhere = [key for key in _portable_keys(recipe) if key.rpartition(".")[2] == plain]
    found = (key for key in siblings if alike(plain, key) or misspelt(plain, key, recipe))
    near = (here + key for key in sorted(found, key=partial(osa_distance, plain)))
    far = (key for key in _portable_keys(recipe) if "_" in key and alike(plain, key.rpartition(".")[2]))
    proposed = elsewhere or list(islice(near, 2)) or list(islice(far, 2))
    if proposed:
        return f"Did you mean {' or '.join(proposed)}?"
    other_unit = [here + key for key in siblings if _same_but_for_unit(plain, key)]
    if other_unit:
        return _about_units(plain, other_unit[0])
    return f"Keys {'of ' + section if section else 'at the top'}: {', '.join(siblings)}."


def _for(target: str, siblings: list[str], section: str) -> str:
    """Return the key to suggest.

    In an entry of ``data.sources``, the entry's own key is preferred to a key of ``data``.
    """
    owner, _, leaf = target.rpartition(".")
    return f"{section}.{leaf}" if owner == "data" and leaf in siblings and leaf in DataSection.model_fields else target


def _words(name: str) -> list[str]:
    """Return the words of a key in the singular."""
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in name.split("_") if word]


@lru_cache(maxsize=1000)
def unit_of(key: str) -> frozenset[str]:
    """Return the units named by the words in a key's last part."""
    units = peer_names().units
    return frozenset(units[word] for word in _words(key.rpartition(".")[2]) if word in units)


def alike(name: str, key: str) -> bool:
    """Return whether two keys differ in spelling only.

    They have equally many words, the same digits and the same unit.
    """
    if unit_of(name) != unit_of(key) or re.findall(r"\d", name) != re.findall(r"\d", key):
        return False
    words, own = _words(name), _words(key)
    if len(words) == len(own) and all(_near(word, of_own) for word, of_own in zip(words, own, strict=True)):
        return True
    joined, own_joined = name.replace("_", ""), key.replace("_", "")
    alike_joined = joined[:1] == own_joined[:1] and _ratio(joined, own_joined) >= ALIKE_JOINED
    return alike_joined and abs(len(joined) - len(own_joined)) <= 1


def osa_distance(first: str, second: str) -> int:
    """Return the optimal string alignment distance of two words.

    It is the number of letters to insert, delete, replace, or swap with a neighbour.
    """
    before, row = list[int](), list(range(len(second) + 1))
    for i, letter in enumerate(first, start=1):
        before, row, above = row, [i], before
        for j, other in enumerate(second, start=1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                row[j] = min(row[j], above[j - 2] + 1)
    return row[-1]


def misspelt(name: str, key: str, recipe: type[Recipe]) -> bool:
    """Return whether a name is ``key`` with one typing error. A name that consists only of known words is not."""
    if abs(len(name) - len(key)) > 1 or re.findall(r"\d", name) != re.findall(r"\d", key):
        return False
    of_known_words = _known_words(recipe).issuperset(_words(name))
    return not of_known_words and unit_of(name) <= unit_of(key) and osa_distance(name, key) == 1


@cache
def _known_words(recipe: type[Recipe]) -> frozenset[str]:
    """Return the words of all keys of this program and of other trainers."""
    theirs = (*peer_names().same_value, *advice())
    names = (key.rpartition(".")[2] for key in (*all_keys(recipe), *theirs))
    return frozenset(word for name in names for word in _words(name))


def _near(word: str, own: str) -> bool:
    """Return whether a word is a misspelling of ``own``.

    Typing errors keep the first letter; other words often do not.
    """
    return word == own or (word[:1] == own[:1] and _ratio(word, own) > ALIKE)


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def _same_but_for_unit(name: str, key: str) -> bool:
    rest, own = ([word for word in _words(text) if word not in peer_names().units] for text in (name, key))
    return bool(rest) and rest == own and bool(unit_of(name)) and bool(unit_of(key))


def _about_units(name: str, key: str) -> str:
    given, own = (" and ".join(sorted(unit_of(text))) for text in (name, key))
    how = f": {PER_EPOCH}" if given == "epochs" else ""
    return f"There is no such key yet. {key} counts {own}, not {given}{how}."
