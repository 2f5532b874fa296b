"""Named sets of keys that an artist picks (``presets.toml``), as changes of a recipe with a reason for each."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lora_rocm.errors import ModelError, UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.tables import read_table
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.recipe.kinds import Kinds, kinds_of
from lora_rocm.recipe.load import load_recipe  # recipe: it ships with the program
from lora_rocm.recipe.recipe_fields import field_sections
from lora_rocm.recipe.recipe_text import written
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.shipped import recipe_for
from lora_rocm.recipe.value_edit import set_value

PresetValue = bool | int | float | str
UNITS = {
    "train.max_train_steps": "train.epochs",
    "optim.lr_warmup_steps": "optim.lr_warmup_ratio",
    "sample.every_n_steps": "sample.every_n_epochs",
    "output.save_every_n_steps": "output.save_every_n_epochs",
}
"""Keys that a recipe may give in another unit instead. A preset does not change the unit."""


@dataclass(frozen=True)
class PresetKey:
    """A row of a preset. The comment of ``presets.toml`` explains the fields.

    of: "images" or "texts", if it is only for recipes with such samples. not_for: families that it is not for.
    """

    key: str
    why: str
    value: int | str | None = None
    most: int | None = None
    least: int | None = None
    usual: bool = False
    keeps: str = ""
    keeps_product: str = ""
    of: str = ""
    not_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preset:
    """A named set of keys.

    purpose: its purpose, in a sentence. purpose_of_texts: its purpose for texts, if that differs.
    """

    name: str
    title: str
    purpose: str
    keys: tuple[PresetKey, ...]
    purpose_of_texts: str = ""


@dataclass(frozen=True)
class PresetTable:
    """The table ``presets.toml``."""

    presets: tuple[Preset, ...]


@dataclass(frozen=True)
class PresetChange:
    """A key that a preset changes in a recipe.

    Attributes:
        section: section of the key.
        name: name of the key.
        before: present value as in a recipe; empty if it has none.
        value: its new value.
        why: the reason for the new value.
    """

    section: str
    name: str
    before: str
    value: PresetValue
    why: str

    @property
    def key(self) -> str:
        """The dotted key."""
        return f"{self.section}.{self.name}"

    @property
    def after(self) -> str:
        """The new value as in a recipe."""
        return written(self.value)


@cache
def presets() -> tuple[Preset, ...]:
    """Return all presets, in the order in which they are offered."""
    return read_table(Path(__file__).with_name("presets.toml"), PresetTable).presets


def preset_named(name: str) -> Preset:
    """Return the preset of a name.

    Raises:
        UserError: no-preset.
    """
    known = {preset.name: preset for preset in presets()}
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in known:
        return known[wanted]
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UserError(
        "no-preset",
        "There is no preset of this name.",
        where=f"--preset {printable(name)}",
        fix=f"{hint}The names: {', '.join(known)}.",
    )


def preset_changes(preset: Preset, recipe: Recipe, registry: FamilyRegistry = FAMILIES) -> tuple[PresetChange, ...]:
    """Return what a preset changes in a recipe. Keys that have its value already are omitted.

    Args:
        preset: the preset.
        recipe: the present recipe.
        registry: the available families.
    """
    values = _Values(recipe, registry)
    found = dict[str, PresetChange]()
    rows = [row for row in preset.keys if values.concerns(row)]
    for row in [*(row for row in rows if not row.keeps), *(row for row in rows if row.keeps)]:
        before, after = values.of(row.key), values.wanted(row, found)
        if after is None or after == before:
            continue
        section, _, name = row.key.partition(".")
        shown = written(_tidy(before)) if isinstance(before, bool | int | float | str) else ""
        found[row.key] = PresetChange(section, name, shown, _tidy(after), row.why)
    return tuple(sorted(found.values(), key=lambda change: values.keys.index(change.key)))


def applied(text: str, changes: Sequence[PresetChange]) -> str:
    """Return the text of a recipe with changes. Comments and all other lines stay.

    Raises:
        YamlSyntaxError: the text is not YAML.
    """
    for change in changes:
        text = set_value(text, change.section, change.name, change.value)
    return text


class _Values:
    """The values of a recipe, and those that the shipped recipe of its family has."""

    def __init__(self, recipe: Recipe, registry: FamilyRegistry) -> None:
        self._recipe, self._registry = recipe, registry
        kinds: Kinds = kinds_of(recipe.model_dump(mode="json"), registry)
        self.keys = [field.key for section in field_sections(kinds) for field in section.fields]
        self._usual: Recipe | None = None

    def concerns(self, row: PresetKey) -> bool:
        """Whether the recipe's family reads the key, and a change has an effect."""
        spec, key = self._recipe.spec, row.key
        kind = "texts" if spec.trains_on_texts else "images"
        if key not in self.keys or spec.name in row.not_for or row.of not in ("", kind):
            return False
        # With sources, resolution and length are in each of them, where presets do not change them
        in_sources = key in ("data.resolution", "data.max_length") and bool(self._recipe.data.sources)
        return not in_sources and not (key in UNITS and self.of(UNITS[key]))

    def of(self, key: str) -> object:
        return _value(self._recipe, key)

    def wanted(self, row: PresetKey, changes: dict[str, PresetChange]) -> PresetValue | None:
        """Return the value that a row of a preset asks for; None if it asks for none. changes: the changes so far."""
        now = self.of(row.key)
        number = now if isinstance(now, int | float) and not isinstance(now, bool) else None
        if row.value is not None:
            return row.value
        if row.usual:
            return self._usual_value(row.key)
        if row.most is not None or row.least is not None:
            return None if number is None else _limited(number, row)
        if number is None:
            return None
        if row.keeps:
            other, new = self.of(row.keeps), changes.get(row.keeps)
            if new is None or not isinstance(other, int) or not isinstance(new.value, int) or not other:
                return None
            return _plain(number * new.value / other)
        other = self.of(row.keeps_product)
        return _plain(number * other) if isinstance(other, int) else None

    def _usual_value(self, key: str) -> PresetValue | None:
        name = self._recipe.spec.name
        if self._usual is None:
            try:
                path = recipe_for((name,), f"model.family: {name}", self._registry).path
            except ModelError:  # no recipe ships for this family
                return None
            self._usual = load_recipe(path, (), self._registry).recipe
        found = _value(self._usual, key)
        return found if isinstance(found, bool | int | float | str) else None


def _limited(number: float, row: PresetKey) -> PresetValue:
    """Return a number within the limits of a row. 0 stays, because it switches something off."""
    if not number:
        return _plain(number)
    low = max(number, row.least) if row.least is not None else number
    return _plain(min(low, row.most) if row.most is not None else low)


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _tidy(value: PresetValue) -> PresetValue:
    """Return a value as people write it: 16 for 16.0."""
    return _plain(value) if isinstance(value, float) else value


def _value(recipe: Recipe, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name, None)
