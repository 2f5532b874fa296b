"""Translates the settings of another trainer into recipe keys. Each setting ends with exactly one outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NoReturn

from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES
from lora_rocm.importing.config_files import ConfigFiles
from lora_rocm.importing.known_secrets import KnownSecrets
from lora_rocm.importing.rows import MappingRow, TrainerTable
from lora_rocm.importing.setting import Setting, UnreadText, Value
from lora_rocm.recipe.kinds import every_kind
from lora_rocm.recipe.peer_names import advice, peer_names
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.suggest import all_keys

Outcome = Literal["taken", "changed", "not-needed", "unsupported"]
INDEX = re.compile(r"\[\d+\]")
NO_SECRETS = "secrets stay out of recipes"


@dataclass(frozen=True)
class Translated:
    """The outcome of one setting.

    Attributes:
        setting: the setting of the other trainer.
        outcome: taken (with the same meaning), changed (taken with a different meaning or unit), not-needed (no effect
            in lora-rocm), or unsupported (lost).
        ours: the dotted recipe key; empty if there is none.
        value: value of the recipe key; None if there is none.
        note: the reason for the outcome, or both meanings; empty for a plain copy.
        changes_weights: whether a lost setting changes the trained weights.
    """

    setting: Setting
    outcome: Outcome
    ours: str = ""
    value: Value = None
    note: str = ""
    changes_weights: bool = False


@dataclass(frozen=True)
class RecipeValue:
    """One value of the new recipe, and the settings that it comes from.

    There are no settings if the importer itself chose the value.
    """

    value: Value
    settings: tuple[Setting, ...]
    note: str = ""


Function = Callable[["Translator", Setting], None]
"""Function that converts one setting, by calling ``take``, ``lose`` or ``skip`` for it."""


@dataclass
class Translator:
    """The state of a translation.

    Attributes:
        table: table of the trainer.
        files: files of the configuration, which also open the files that settings name.
        settings: all settings, in the order of the files.
        values: maps dotted recipe keys to values. Keys of list items have indices: ``data.sources[0].path``.
        outcomes: outcomes of the settings so far.
        unread: parts of the files that could not be read.
        secrets: values that reach a secret key.
    """

    table: TrainerTable
    files: ConfigFiles
    settings: Sequence[Setting]
    unread: list[UnreadText] = field(default_factory=list)
    secrets: KnownSecrets = field(default_factory=KnownSecrets)
    values: dict[str, RecipeValue] = field(default_factory=dict)
    outcomes: list[Translated] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_key: dict[str, Setting] = {}
        self._by_exact_key = {setting.key.lower(): setting for setting in self.settings}
        for setting in self.settings:  # the last one counts, as in the trainers' own parsers
            self._by_key[plain_key(setting.key)] = setting
        self._defaults = {key: Setting(key, value) for key, value in self.table.defaults.items()}
        self._settled: dict[int, Setting] = {}  # by identity; kept alive, so that no identity is used twice

    # reading

    def given(self, *keys: str) -> Setting | None:
        """Return the first of these keys' settings that a file contains; None if there is none."""
        return next((found for key in keys if (found := self._by_key.get(key)) is not None), None)

    def given_exactly(self, key: str) -> Setting | None:
        """Return the setting with exactly this key, including list indices; None if no file contains it."""
        return self._by_exact_key.get(key.lower())

    def setting(self, *keys: str) -> Setting | None:
        """Same as ``given``, but fall back to the trainer's first default for these keys."""
        default = next((self._defaults[key] for key in keys if key in self._defaults), None)
        return self.given(*keys) or default

    def default(self, key: str) -> Setting | None:
        """Return the trainer's default for a key; None if the table has none. Each call returns the same object."""
        return self._defaults.get(key)

    def use_defaults(self, defaults: Mapping[str, Value]) -> None:
        """Add defaults that depend on the kind of file. They replace the table's defaults for the same keys."""
        self._defaults |= {key: Setting(key, value) for key, value in defaults.items()}

    def value(self, *keys: str) -> Value:
        """Return the value of the result of ``setting``; None if there is no setting."""
        found = self.setting(*keys)
        return None if found is None else found.value

    def below(self, section: str) -> Iterator[Setting]:
        """Yield the settings of a section or list in the order of the file.

        For example, ``datasets`` has ``datasets[0].path``.
        """
        begin = re.compile(rf"{re.escape(section)}(?:\.|\[)", re.IGNORECASE)
        return (setting for setting in self.settings if begin.match(setting.key))

    # deciding

    def take(self, ours: str, value: Value, *settings: Setting, note: str = "") -> None:
        """Write a recipe key for these settings. ``note``: how the meaning differs; empty if it is the same."""
        if isinstance(value, str | list) and any(setting.is_secret for setting in settings):
            for setting in settings:
                self.skip(setting, NO_SECRETS)
            return
        known = self.values.get(ours)
        if known is not None and known.value != value and settings:
            by = known.settings[0].key if known.settings else "the importer"
            for setting in settings:
                self.lose(setting, f"{ours} is already set by {by}", ours=ours)
            return
        self.values[ours] = RecipeValue(value, settings, note)
        for setting in settings:
            self._settle(Translated(setting, "changed" if note else "taken", ours, value, note))

    def skip(self, setting: Setting, why: str) -> None:
        """Mark a setting as not needed, because it has no effect in lora-rocm or lora-rocm always does the same."""
        self._settle(Translated(setting, "not-needed", note=why))

    def lose(self, setting: Setting, would: str, *, ours: str = "", changes_weights: bool = True) -> None:
        """Mark a setting as lost, because lora-rocm does not support it. ``would``: the effect that it would have."""
        self._settle(Translated(setting, "unsupported", ours, None, would, changes_weights))

    def change(self, setting: Setting, note: str) -> None:
        """Mark a setting that was taken as changed, because its meaning differs."""
        self.outcomes = [
            replace(row, outcome="changed", note=note) if row.setting is setting else row for row in self.outcomes
        ]

    def split(self, setting: Setting) -> None:
        """Replace a setting by the settings that it consists of. Each of these gets its own outcome (``translate``)."""
        self._settled[id(setting)] = setting

    def refuse_base(self, what: str, setting: Setting | None) -> NoReturn:
        """Stop the import, because lora-rocm does not train this kind of base model.

        Raises:
            UserError: always.
        """
        names = ", ".join(FAMILIES.names)
        where = setting.where if setting is not None else ""
        said = f"{setting.key}: {setting.shown}" if setting is not None else ""
        fix = f"lora-rocm trains these families: {names}."
        sentence = f"This is a configuration for {what}, which lora-rocm does not train."
        raise UserError("import-family", sentence, where=f"{where} {said}".strip(), fix=fix)

    def is_settled(self, setting: Setting) -> bool:
        """Whether the setting has an outcome."""
        return id(setting) in self._settled

    def _settle(self, row: Translated) -> None:
        if id(row.setting) in self._settled:
            return
        self._settled[id(row.setting)] = row.setting
        if not row.setting.is_default or row.outcome in ("taken", "changed") or row.changes_weights:
            self.outcomes.append(row)

    # the table

    def run_table(self, functions: Mapping[str, Function]) -> None:
        """Apply the table's rows to all settings without an outcome, then to the trainer's defaults for absent keys."""
        for setting in self.settings:
            later = self._by_exact_key[setting.key.lower()]
            if self.is_settled(setting):
                continue
            if later is not setting:
                self.skip(setting, f"a later line sets it: {later.where}")
            else:
                self.translate(setting, functions)
        for key, default in self._defaults.items():
            row = next((row for row in self.table.row if key in row.keys), None)
            if row is not None and self.given(*row.keys) is None and not self.is_settled(default):
                self._apply(row, default, functions)

    def translate(self, setting: Setting, functions: Mapping[str, Function]) -> None:
        """Translate one setting by its row.

        A key without a row is copied if it has the same meaning in all trainers.
        """
        row = self._row_of(setting)
        if row is not None:
            self._apply(row, setting, functions)
            return
        name = plain_key(setting.key).rpartition(".")[2]
        ours = peer_names().same_value.get(name) or own_keys().get(name)
        if setting.is_secret:
            self.skip(setting, NO_SECRETS)
        elif setting.value in (None, "", False):
            self.skip(setting, "it is off")
        elif ours is not None and "." in ours:
            self.take(ours, setting.value, setting)
        else:
            self.lose(setting, advice().get(name, "the importer does not know this key"))

    def _row_of(self, setting: Setting) -> MappingRow | None:
        """Return the row for a key. A row for its dotted name precedes a row for its last part."""
        key = plain_key(setting.key)
        candidates = [key, key.rpartition(".")[2]]
        for name in candidates:
            for row in self.table.row:
                if name in row.keys:
                    return row
        return None

    def _apply(self, row: MappingRow, setting: Setting, functions: Mapping[str, Function]) -> None:
        """Apply one row. An empty value or None means that the key is absent."""
        if setting.value is None or (isinstance(setting.value, str | list | Mapping) and not setting.value):
            self.skip(setting, "it is empty")
        elif row.kind == "same":
            self.take(row.ours, setting.value, setting, note=row.note)
        elif row.kind == "convert":
            functions[row.function](self, setting)
            assert self.is_settled(setting), f"{row.function} did not decide about {setting.key}"
        elif row.kind == "not-needed":
            self.skip(setting, row.note)
        elif setting.value in row.neutral:
            self.skip(setting, "this value has no effect")
        else:
            self.lose(setting, row.note, ours=row.ours, changes_weights=row.changes_weights)

    def withdraw(self, ours: str, why: str, *, is_lost: bool = True) -> None:
        """Remove a recipe key and the keys below it. Their settings become unsupported, or not needed."""
        gone = [key for key in self.values if key == ours or key.startswith((f"{ours}.", f"{ours}["))]
        lost = {id(setting) for key in gone for setting in self.values.pop(key).settings}
        outcome: Outcome = "unsupported" if is_lost else "not-needed"
        self.outcomes = [
            replace(row, outcome=outcome, ours=ours, value=None, note=why, changes_weights=is_lost)
            if id(row.setting) in lost
            else row
            for row in self.outcomes
            if is_lost or not row.setting.is_default or id(row.setting) not in lost
        ]

    def hide_secrets(self) -> None:
        """Remove known secrets from everything that is written or printed.

        Settings of the files are marked when they are read. Values, reasons and settings that a trainer's functions
        make from them are not.
        """
        secrets = self.secrets
        for key in [key for key, each in self.values.items() if secrets.are_in(each.value)]:
            if key in self.values:
                self.withdraw(key, NO_SECRETS, is_lost=False)
        hidden: dict[int, Setting] = {}  # one object for each setting: ``withdraw`` compares identities

        def of(setting: Setting) -> Setting:
            return hidden.setdefault(id(setting), secrets.hidden_in(setting))

        for key, each in self.values.items():
            settings = tuple(map(of, each.settings))
            self.values[key] = replace(each, settings=settings, note=secrets.hidden(each.note))
        self.outcomes = [replace(row, setting=of(row.setting), note=secrets.hidden(row.note)) for row in self.outcomes]
        self.unread = secrets.hidden_of(self.unread)
        self.files.unread = secrets.hidden_of(self.files.unread)


@cache
def own_keys() -> Mapping[str, str]:
    """Map the last part of a recipe key to the key, if it is unique among the keys of all kinds of recipes."""
    found: dict[str, set[str]] = {}
    for section in Recipe.model_fields:
        for kinds in every_kind(section):
            for key in all_keys(kinds.recipe):
                found.setdefault(key.rpartition(".")[2], set()).add(key)
    return {name: next(iter(keys)) for name, keys in found.items() if len(keys) == 1 and "." in next(iter(keys))}


def plain_key(key: str) -> str:
    """Return a key as tables spell it: in lower case, without list indices."""
    return INDEX.sub("", key).lower()
