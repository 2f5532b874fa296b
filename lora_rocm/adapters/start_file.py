"""Whether a LoRA file can start a recipe's adapter; where it cannot, every setting that would let it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from lora_rocm.adapters.lora_reader import LoraEntry
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import ModelFamily
from lora_rocm.recipe.schema import LoraSection


def check_start(
    family: ModelFamily,
    lora: LoraSection,
    adapted: Collection[str],
    entries: Mapping[str, LoraEntry],
    path: Path,
) -> None:
    """Refuse a file that does not fit; its error names all settings at once, and with them the file is taken.

    Args:
        family: knows the presets of targets.
        lora: the recipe's section.
        adapted: names of the modules that the recipe adapts.
        entries: what the file holds.
        path: the file.

    Raises:
        AdapterError: init-from-axis, init-from-beyond, init-from-unfit.
    """
    _refuse_per_input(entries, path)
    outside = [name for name in entries if name not in adapted]
    text = [name for name in outside if name.split(".")[0] in family.text_components]
    _refuse_beyond_text_targets(family, text, path)
    highest = max(entry.rank for entry in entries.values())
    what, settings = [], []
    if text and not lora.train_text_encoder:
        what.append("it adapts the text encoders")
        settings.append("lora.train_text_encoder to true")
    rest = sorted(set(outside) - set(text))
    if rest:
        what.append(f"it adapts {_modules(rest)}, which lora.targets leaves out")
        settings.append(f"lora.targets to {_targets_for(family, lora, adapted, rest)}")
    if highest > lora.rank:
        what.append(f"it has rank {highest}, the recipe asks for rank {lora.rank}")
        settings.append(f"lora.rank to {highest}")
    if not lora.use_dora and any(entry.magnitude is not None for entry in entries.values()):
        what.append("it is a DoRA")
        settings.append("lora.use_dora to true")
    if settings:
        fix = f"Set {', '.join(settings)}."
        raise _unfit("init-from-unfit", f"The file does not fit the recipe: {'; '.join(what)}.", path, fix)


def _refuse_per_input(entries: Mapping[str, LoraEntry], path: Path) -> None:
    name = next((name for name, entry in entries.items() if entry.input_magnitude is not None), None)
    if name is None:
        return
    magnitudes = entries[name].input_magnitude
    assert magnitudes is not None, "it was looked for"
    raise _unfit(
        "init-from-axis",
        f"The file is a DoRA with one magnitude an input (dora_scale of {name}: {[1, *magnitudes.shape]}). Training "
        "here has one an output, which cannot go on from that.",
        path,
        "Start without it, or from a DoRA that was trained with one magnitude an output (OneTrainer: Apply on output "
        "axis; LyCORIS: wd_on_output=True). lora-rocm sample draws with the file as it is.",
    )


def _refuse_beyond_text_targets(family: ModelFamily, text: Iterable[str], path: Path) -> None:
    """No setting reaches modules of the text encoders that no preset has."""
    presets = list(family.lora_targets.values())
    beyond = [name for name in text if not any(_covers(preset, [name]) for preset in presets)]
    if beyond:
        raise _unfit(
            "init-from-beyond",
            f"The file adapts {_modules(beyond)}, which is not trained here.",
            path,
            "Start without it, or from a LoRA without these modules. lora-rocm sample draws with the file as it is.",
        )


def _targets_for(family: ModelFamily, lora: LoraSection, adapted: Iterable[str], more: Iterable[str]) -> str:
    """A value of ``lora.targets`` for what is adapted and for more: a preset's name, else expressions as YAML."""
    unet = [name for name in adapted if name.split(".")[0] not in family.text_components]
    more = list(more)
    presets = family.lora_targets
    fitting = next((name for name, preset in presets.items() if _covers(preset, [*unet, *more])), None)
    if fitting is not None:
        return fitting
    own = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
    expressions = [pattern for target in own for pattern in _expressions(family, presets.get(target, {"": target}))]
    best = max(presets.values(), key=lambda preset: sum(_covers(preset, [name]) for name in more))
    if any(_covers(best, [name]) for name in more):
        expressions = _expressions(family, best) if _covers(best, unet) else expressions + _expressions(family, best)
        more = [name for name in more if not _covers(best, [name])]
    numberless = {re.sub(r"\d+", r"\\d+", re.escape(name.partition(".")[2])) for name in more}
    quoted = ("'" + pattern.replace("'", "''") + "'" for pattern in [*expressions, *sorted(numberless)])
    return f"[{', '.join(quoted)}]"


def _expressions(family: ModelFamily, preset: Mapping[str, str]) -> list[str]:
    """Of a preset without the text encoders', which lora.targets does not choose."""
    return [pattern for component, pattern in preset.items() if component not in family.text_components]


def _covers(preset: Mapping[str, str], names: Iterable[str]) -> bool:
    """Whether a preset (component -> expression) adapts all of these modules."""
    parts = [name.partition(".") for name in names]
    return all(re.fullmatch(preset.get(component, ""), module) is not None for component, _, module in parts)


def _modules(names: Iterable[str]) -> str:
    found = sorted(names)
    return found[0] if len(found) == 1 else f"{len(found)} modules such as {found[0]}"


def _unfit(code: str, what: str, path: Path, fix: str) -> AdapterError:
    return AdapterError(code, what, where=f"lora.init_from: {path}", fix=fix)
