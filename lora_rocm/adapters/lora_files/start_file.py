"""Checks whether a LoRA file can start a recipe's adapter. If not, the error names every setting to change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.entry import Entry, FileKind
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import ModelFamily
from lora_rocm.recipe.adapter_sections import AdapterSection


def check_start(
    family: ModelFamily,
    lora: AdapterSection,
    adapter: Adapter,
    files: FileKind,
    entries: Mapping[str, Entry],
    path: Path,
) -> None:
    """Raise an error if a file cannot start the recipe's adapter. The error names all settings to change.

    Args:
        family: the model family, which defines the target presets.
        lora: the recipe's adapter section.
        adapter: the adapter that the recipe defines.
        files: the file's kind.
        entries: the file's entries, keyed by module name.
        path: path of the file.

    Raises:
        AdapterError: the file cannot start the adapter (init-from-kind, init-from-axis, init-from-beyond,
            init-from-unfit).
    """
    if files is not adapter.files:
        what = f"The file is a {files.name}, but the recipe trains a {adapter.files.name}."
        fix = f"Set lora.type to {files.name.lower()}, or remove lora.init_from."
        raise _unfit("init-from-kind", what, path, fix)
    adapted = adapter.modules
    unfit = adapter.unfit(lora, entries, path)
    outside = [name for name in entries if name not in adapted]
    text = [name for name in outside if name.split(".")[0] in family.text_components]
    _refuse_beyond_text_targets(family, text, path)
    found = []
    if text and not any(name.split(".")[0] in family.text_components for name in adapted):
        found.append(("it adapts the text encoders", "lora.train_text_encoder to true"))
    rest = sorted(set(outside) - set(text))
    if rest:
        what = f"it adapts {_modules(rest)}, which lora.targets does not select"
        found.append((what, f"lora.targets to {_targets_for(family, lora, adapted, rest)}"))
    found += unfit
    if found:
        fix = f"Set {', '.join(setting for _, setting in found)}."
        raise _unfit(
            "init-from-unfit", f"The file does not fit the recipe: {'; '.join(w for w, _ in found)}.", path, fix
        )


def _refuse_beyond_text_targets(family: ModelFamily, text: Iterable[str], path: Path) -> None:
    """Raise an error if the file adapts text encoder modules outside every preset; no setting can select these."""
    presets = list(family.lora_targets.values())
    beyond = [name for name in text if not any(_covers(preset, [name]) for preset in presets)]
    if beyond:
        raise _unfit(
            "init-from-beyond",
            f"The file adapts {_modules(beyond)}, which lora-rocm cannot train.",
            path,
            "Remove lora.init_from, or use a LoRA without these modules. lora-rocm sample can use the file unchanged.",
        )


def _targets_for(family: ModelFamily, lora: AdapterSection, adapted: Iterable[str], more: Iterable[str]) -> str:
    """Return a value of ``lora.targets`` that covers ``adapted`` and ``more``: a preset's name or a YAML list."""
    others = [name for name in adapted if name.split(".")[0] not in family.text_components]
    more = list(more)
    presets = family.lora_targets
    fitting = next((name for name, preset in presets.items() if _covers(preset, [*others, *more])), None)
    if fitting is not None:
        return fitting
    own = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
    expressions = [pattern for target in own for pattern in _expressions(family, presets.get(target, {"": target}))]
    best = max(presets.values(), key=lambda preset: sum(_covers(preset, [name]) for name in more))
    if any(_covers(best, [name]) for name in more):
        expressions = _expressions(family, best) if _covers(best, others) else expressions + _expressions(family, best)
        more = [name for name in more if not _covers(best, [name])]
    numberless = {re.sub(r"\d+", r"\\d+", re.escape(name.partition(".")[2])) for name in more}
    quoted = ("'" + pattern.replace("'", "''") + "'" for pattern in [*expressions, *sorted(numberless)])
    return f"[{', '.join(quoted)}]"


def _expressions(family: ModelFamily, preset: Mapping[str, str]) -> list[str]:
    """Return a preset's expressions except those for text encoders, which ``lora.targets`` does not select."""
    return [pattern for component, pattern in preset.items() if component not in family.text_components]


def _covers(preset: Mapping[str, str], names: Iterable[str]) -> bool:
    """Return whether a preset selects all of these modules. ``preset`` maps a component to a regular expression."""
    parts = [name.partition(".") for name in names]
    return all(re.fullmatch(preset.get(component, ""), module) is not None for component, _, module in parts)


def _modules(names: Iterable[str]) -> str:
    found = sorted(names)
    return found[0] if len(found) == 1 else f"{len(found)} modules such as {found[0]}"


def _unfit(code: str, what: str, path: Path, fix: str) -> AdapterError:
    return AdapterError(code, what, where=f"lora.init_from: {path}", fix=fix)
