"""Gives every key of a trainer's table every kind of value: each setting ends with one outcome, and nothing raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lora_rocm.importing.config_files import ConfigFile, ConfigFiles
from lora_rocm.importing.registry import trainer_of
from lora_rocm.importing.rows import table_of
from lora_rocm.importing.setting import Setting, Value
from lora_rocm.importing.translator import Translator

VALUES: tuple[Value, ...] = (
    1, 0, -1, 0.5, 10**30, "text", "", "true", "1,5", "inf", True, False, None, [], [1, "a"], [[512, 4]], {}, {"a": 1},
)  # fmt: skip
"""One value of each kind that a damaged or an unusual file may have."""


def check_rows(trainer: str, base: Sequence[tuple[str, Value]], lists: Sequence[str], value: Value) -> None:
    """Assert that all rows can be carried out for a value.

    Args:
        trainer: its id.
        base: settings that every configuration needs; their keys do not get the value.
        lists: sections that are lists: their keys get the index 0.
        value: of all keys.
    """
    given = dict(base)
    keys = [key for row in table_of(trainer).row for key in row.keys if key not in given]
    settings = [Setting(key, each, "train.toml", 1) for key, each in base]
    settings += [Setting(_with_index(key, lists), value, "train.toml", line) for line, key in enumerate(keys, 2)]
    files = ConfigFiles((ConfigFile(Path("train.toml"), ""),))
    translator = Translator(table_of(trainer), files, settings)
    found = trainer_of(trainer)
    found.prepare(translator)
    translator.run_table(found.functions)
    found.finish(translator)
    counts = Counter(id(row.setting) for row in translator.outcomes if not row.setting.is_default)
    assert all(count == 1 for count in counts.values())
    unsettled = [setting.key for setting in settings if not translator.is_settled(setting)]
    assert not unsettled
    unknown = [row.setting.key for row in translator.outcomes if row.note == "the importer does not know this key"]
    assert not [key for key in unknown if key in keys]


def _with_index(key: str, lists: Sequence[str]) -> str:
    name = next((name for name in lists if key.startswith(f"{name}.")), "")
    return f"{name}[0]{key.removeprefix(name)}" if name else key
