"""Imports a configuration for tests, and looks up the outcomes of its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from lora_rocm.importing.importer import ImportedRecipe, import_files, translated
from lora_rocm.importing.translator import Translated

CONFIGS = Path(__file__).parent / "configs"


def imported(folder: Path, options: Sequence[str] = (), **files: str) -> ImportedRecipe:
    """The recipe from files with these contents. ``train_toml`` is train.toml; the first is the main file."""
    paths = []
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        path = folder / f"{stem}.{suffix}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return import_files(paths[:1], options)


def values_of(found: ImportedRecipe) -> dict[str, Any]:
    """Dotted key -> value of a recipe; items of lists have indices, lists of scalars are values."""
    return dict(_flat(YAML(typ="safe").load(found.text), ""))


def _flat(value: Any, above: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _flat(each, f"{above}.{name}" if above else str(name))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for index, each in enumerate(value):
            yield from _flat(each, f"{above}[{index}]")
    else:
        yield above, value


def row_of(found: ImportedRecipe, key: str) -> Translated:
    """The row of the setting with this key."""
    (row,) = [row for row in found.outcomes if row.setting.key == key]
    return row


def outcome_of(found: ImportedRecipe, key: str) -> str:
    """The outcome of the setting with this key."""
    return row_of(found, key).outcome


def check_outcomes(paths: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Assert that each setting of the files has exactly one outcome, or was split into settings that have one."""
    translator = translated(paths, options)
    counts = Counter(id(row.setting) for row in translator.outcomes)
    assert all(count == 1 for count in counts.values()), counts
    assert all(translator.is_settled(setting) for setting in translator.settings)
