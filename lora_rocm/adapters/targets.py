"""Selects the modules that a recipe adapts, by a preset of the family or by the user's regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable

import regex

from lora_rocm.adapters.module_names import adaptable
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.recipe.adapter_sections import AdapterSection

EXAMPLES = 4
MATCHING_S = 5.0
"""CPU seconds allowed to match one module name; sane expressions take microseconds."""


def targets(family: ModelFamily, model: LoadedModel, lora: AdapterSection) -> dict[str, str]:
    """Return component -> regular expression that matches exactly the modules to adapt.

    Raises:
        AdapterError: targets-invalid, targets-endless, targets-match-nothing.
    """
    presets = family.lora_targets
    # a preset's expressions, or the user's (with the default preset's for text encoders)
    if isinstance(lora.targets, str) and lora.targets in presets:
        wanted = dict(presets[lora.targets])
    else:
        own = (lora.targets,) if isinstance(lora.targets, str) else lora.targets
        default = next(iter(presets.values()))
        wanted = {c: p if c in family.text_components else "|".join(own) for c, p in default.items()}
    chosen = {}
    # match them against each component's modules
    for component, pattern in wanted.items():
        text = component in family.text_components
        if component not in model.components or (text and not lora.train_text_encoder):
            continue
        paths = [path for path, _ in adaptable(model.components[component])]
        fix = f"Presets: {', '.join(presets)}. Else a regular expression of Python's for whole module names."
        try:
            compiled = regex.compile(pattern)
            matching = [path for path in paths if compiled.fullmatch(path, timeout=MATCHING_S)]
        except (regex.error, OverflowError, RecursionError) as error:
            raise AdapterError(
                "targets-invalid",
                f"This is no regular expression: {error}.",
                where=f"lora.targets: {pattern}",
                fix=fix,
            ) from error
        except TimeoutError as error:
            raise AdapterError(
                "targets-endless",
                f"A module's name could not be matched within {MATCHING_S:g} s: there are too many ways to try.",
                where=f"lora.targets: {pattern}",
                fix=f"Write it without repetitions inside repetitions, such as (.*)*. {fix}",
            ) from error
        if not matching:
            raise AdapterError(
                "targets-match-nothing",
                f"No module of {component} is matched.",
                where=f"lora.targets: {pattern}",
                fix=f"Presets: {', '.join(presets)}. Module names look like {', '.join(_spread(paths))}.",
            )
        chosen[component] = either(matching)
    return chosen


def either(paths: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these paths."""
    return "|".join(re.escape(path) for path in sorted(paths))


def _spread(paths: list[str]) -> list[str]:
    """Return a few of many names, evenly spread."""
    step = max(1, len(paths) // EXAMPLES)
    return paths[step // 2 :: step][:EXAMPLES]
