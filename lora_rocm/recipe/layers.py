"""The layers of a recipe (base, file, ``--set``), merged into one, with the origin of each key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_rocm.recipe.yaml_tree import Key, Span, dotted, value_at

# A recipe gives one key of each pair; a layer that sets one removes the other from the layers below.
EITHER_OR: dict[Key, Key] = {
    ("data", "path"): ("data", "sources"),
    ("data", "sources"): ("data", "path"),
    ("train", "max_train_steps"): ("train", "epochs"),
    ("train", "epochs"): ("train", "max_train_steps"),
}


@dataclass(frozen=True)
class ValueOrigin:
    """Where a value was given: a file and line, or ``--set``.

    name: the key's old name if the user wrote it there, else empty. text: spelling in the file of a number, true,
    false or null. span: place of the value in the file.
    """

    origin: str
    line: int | None = None
    name: str = ""
    text: str = ""
    span: Span | None = None

    def __str__(self) -> str:
        return self.origin if self.line is None else f"{self.origin}:{self.line}"


@dataclass
class Layered:
    """Merged recipe data with the origin of each key.

    Attributes:
        origin: the recipe file.
        data: the merged data.
        places: the origin of each key.
        texts: the text of each file, by its origin.
    """

    origin: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, ValueOrigin] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def where(self, key: Key) -> str:
        """Return origin and name of a key, such as "file.yaml:12 lora.rank".

        A missing key gets the line of its section.
        """
        near = next((key[:n] for n in range(len(key), 0, -1) if key[:n] in self.places), ())
        known = self.places.get(near)
        name = dotted((known.name, *key[len(near) :])) if known and known.name else dotted(key)
        return f"{known or self.origin} {name}".rstrip()

    def written(self, key: Key) -> str:
        """Return the spelling in the file of a number, true, false or null; empty for other values."""
        return self.places[key].text if key in self.places else ""

    def merge(self, data: dict[str, Any], places: dict[Key, ValueOrigin]) -> None:
        """Merge ``data`` on top: sections are merged key by key; all other values, including lists, are replaced."""
        for key, other in EITHER_OR.items():
            if value_at(data, key) is not None and value_at(data, other) is None:
                self._drop(other)
        self._merge_into(self.data, data, ())
        self.places.update(places)

    def _merge_into(self, below: dict[str, Any], above: dict[str, Any], prefix: Key) -> None:
        for name, value in above.items():
            key = (*prefix, name)
            if isinstance(value, dict) and isinstance(below.get(name), dict):
                self._merge_into(below[name], value, key)
            else:
                self._drop(key)
                below[name] = value

    def _drop(self, key: Key) -> None:
        section = value_at(self.data, key[:-1])
        if isinstance(section, dict):
            section.pop(key[-1], None)
        for place in [place for place in self.places if place[: len(key)] == key]:
            del self.places[place]
