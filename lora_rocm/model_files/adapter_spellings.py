"""Interprets the names of tensors and modules in adapter files, in every supported spelling.

``inspect`` uses the same functions to report which programs can read a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.errors import AdapterError
from lora_rocm.foundation.tables import read_table
from lora_rocm.model_files.adapter_parts import Stored

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Rewritten:
    """A rule that rewrites tensor names: regular expression to search for, and its replacement."""

    pattern: str
    by: str


@dataclass(frozen=True)
class Component:
    """The names of one model component in the adapter files of some families.

    prefixes: possible prefixes of module names.
    own_prefixes: whether "lora_NAME_" and "NAME." are prefixes, too.
    modules, norms: regular expressions for the whole name after the prefix, with dots replaced by "_".
    """

    name: str
    families: tuple[str, ...]
    prefixes: tuple[str, ...]
    modules: tuple[str, ...]
    norms: tuple[str, ...] = ()
    own_prefixes: bool = True

    @property
    def starts(self) -> tuple[str, ...]:
        """All prefixes that module names of this component may have."""
        return (*self.prefixes, *((f"lora_{self.name}_", f"{self.name}.") if self.own_prefixes else ()))


@dataclass(frozen=True)
class SpellingTable:
    """The table ``adapter_spellings.toml``."""

    rewritten: tuple[Rewritten, ...]
    components: tuple[Component, ...]


@dataclass(frozen=True)
class NamedModule:
    """The model's module to which a name in a file refers.

    name: module name without the component's prefix, as returned by ``plain``.
    """

    component: str
    name: str


@cache
def _table() -> SpellingTable:
    return read_table(Path(__file__).with_name("adapter_spellings.toml"), SpellingTable)


@cache
def _rewritten() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(row.pattern), row.by) for row in _table().rewritten)


@cache
def _rewritten_anywhere() -> tuple[re.Pattern[str], ...]:
    """Return the patterns of all rewriting rules, for a text with one name per line."""
    return tuple(re.compile(row.pattern, re.MULTILINE) for row in _table().rewritten)


@cache
def _known(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def plain(name: str) -> str:
    """Return a module name with dots replaced by "_", and without CLIP's "text_model" level.

    Only some versions of transformers have this level.
    """
    return name.replace(".", "_").removeprefix("text_model_")


def standard_names(tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """Return the tensors of a file under standard names.

    Prefixes of wrappers and names of adapters are removed, and outdated spellings are replaced.

    Raises:
        AdapterError: "lora-parts": two names refer to the same tensor, or the file contains several adapters.
    """
    text = "\n".join(tensors)
    if not any(pattern.search(text) for pattern in _rewritten_anywhere()):  # most files, in a tenth of the time
        return dict(tensors)
    found: dict[str, Stored] = {}
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        standard = name
        for pattern, by in _rewritten():
            match = pattern.search(standard)
            if match is not None:
                adapters |= {match["adapter"]} if "adapter" in pattern.groupindex else set()
                standard = pattern.sub(by, standard)
        if standard in found:
            raise AdapterError(
                "lora-parts",
                f"This file has the same part of a module twice: {name:.200} is the second.",
                where=str(path),
                fix="Use a file with only one adapter.",
            )
        found[standard] = tensor
    if len(adapters) > 1:
        named = ", ".join(sorted(adapters)[:4])
        raise AdapterError(
            "lora-parts",
            f"This file contains several adapters: {named:.200}.",
            where=str(path),
            fix="Save only one of them to a file.",
        )
    return found


def components(family: str) -> tuple[Component, ...]:
    """Return the components of a family's models that adapter files may contain."""
    return tuple(row for row in _table().components if family in row.families)


def split(family: str, key: str) -> NamedModule | None:
    """Return the component and module to which a key refers, by its prefix; None if the prefix is unknown."""
    fits = ((start, row) for row in components(family) for start in row.starts if start and key.startswith(start))
    best = max(fits, key=lambda fit: len(fit[0]), default=None)
    return None if best is None else NamedModule(best[1].name, plain(key.removeprefix(best[0])))


def place_of(family: str, key: str, norm: bool = False) -> NamedModule | None:
    """Return the model's module to which a key of a file refers; None if no model of the family has such a module.

    Block numbers are not checked, because the number of blocks depends on the base model. A name in PEFT's spelling
    may belong to any component.
    """
    found = split(family, key)
    main = next((row for row in components(family) if "" in row.prefixes), None)
    if main is None:
        return None
    if found is None:
        found = NamedModule(main.name, plain(key))
    for row in components(family):
        own = row.name == found.component or key.startswith(PEFT_PREFIX)
        if own and _known(row.norms if norm else row.modules).fullmatch(found.name):
            return NamedModule(row.name, found.name)
    return None


def any_rewritten(names: Iterable[str]) -> bool:
    """Whether any name contains a wrapper's prefix or an adapter's name, which other programs do not remove."""
    wrappers = [pattern for pattern, _ in _rewritten()[:4]]
    return any(pattern.search(name) for name in names for pattern in wrappers)
