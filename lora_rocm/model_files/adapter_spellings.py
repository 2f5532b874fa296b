"""Names of tensors and modules in adapter files, in every spelling that is read.

Code that reads a file and code that only reports its readers (``inspect``) use the same functions.
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
    """A regular expression that is searched in a tensor's name, and its replacement."""

    pattern: str
    by: str


@dataclass(frozen=True)
class Component:
    """The spelling of one component in the adapter files of some families.

    prefixes: before names of its modules; own_prefixes: "lora_NAME_" and "NAME.", too. modules, norms: regular
    expressions for whole names after the prefix, with dots as _.
    """

    name: str
    families: tuple[str, ...]
    prefixes: tuple[str, ...]
    modules: tuple[str, ...]
    norms: tuple[str, ...] = ()
    own_prefixes: bool = True

    @property
    def starts(self) -> tuple[str, ...]:
        """All prefixes."""
        return (*self.prefixes, *((f"lora_{self.name}_", f"{self.name}.") if self.own_prefixes else ()))


@dataclass(frozen=True)
class SpellingTable:
    """The file."""

    rewritten: tuple[Rewritten, ...]
    components: tuple[Component, ...]


@dataclass(frozen=True)
class NamedModule:
    """The module that a file's name means. name: after the prefix, as returned by ``plain``."""

    component: str
    name: str


@cache
def _table() -> SpellingTable:
    return read_table(Path(__file__).with_name("adapter_spellings.toml"), SpellingTable)


@cache
def _rewritten() -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(row.pattern), row.by) for row in _table().rewritten)


@cache
def _known(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or r"(?!)")


def plain(name: str) -> str:
    """Return a module's name with dots as _, and without CLIP's "text_model" level, which only some versions have."""
    return name.replace(".", "_").removeprefix("text_model_")


def standard_names(tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by standard names: without wrappers, adapters' names and outdated spellings.

    Raises:
        AdapterError: "lora-parts": two names mean the same tensor, or there are several adapters in the file.
    """
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
                f"Two tensors of this file are the same part: {name:.200} is the second.",
                where=str(path),
                fix="Use a file of one adapter.",
            )
        found[standard] = tensor
    if len(adapters) > 1:
        named = ", ".join(sorted(adapters)[:4])
        raise AdapterError(
            "lora-parts", f"This file holds several adapters: {named:.200}.", where=str(path), fix="Save one of them."
        )
    return found


def components(family: str) -> tuple[Component, ...]:
    """Return the components of a family that adapter files name."""
    return tuple(row for row in _table().components if family in row.families)


def split(family: str, key: str) -> NamedModule | None:
    """Return component and name of a module by its prefix; None if the prefix is unknown."""
    fits = ((start, row) for row in components(family) for start in row.starts if start and key.startswith(start))
    best = max(fits, key=lambda fit: len(fit[0]), default=None)
    return None if best is None else NamedModule(best[1].name, plain(key.removeprefix(best[0])))


def place_of(family: str, key: str, norm: bool = False) -> NamedModule | None:
    """Return the module that a key of a file means in a family; None if no model of the family has such a module.

    The number of blocks is not checked: it depends on the base. A name in PEFT's spelling may belong to any component.
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
    """Whether a name has the mark of a wrapper or an adapter's name, which other programs do not remove."""
    wrappers = [pattern for pattern, _ in _rewritten()[:4]]
    return any(pattern.search(name) for name in names for pattern in wrappers)
