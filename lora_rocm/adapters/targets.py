"""Selects the modules that a recipe adapts, by a preset of the family or by the user's regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import regex

from lora_rocm.adapters.lora_files.key_table import adaptable
from lora_rocm.errors import AdapterError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.recipe.adapter_sections import AdapterSection, LoraSection, ModuleOverride, has_kernel

EXAMPLES = 4
MATCHING_S = 5.0
"""Time limit for matching one module name, in CPU seconds. Reasonable expressions take microseconds."""


def targets(family: ModelFamily, model: LoadedModel, lora: AdapterSection) -> dict[str, list[str]]:
    """Return the paths of the modules to adapt, keyed by component.

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
        known = f"Presets: {', '.join(presets)}."
        fix = f"{known} Or use a Python regular expression that matches whole module names."
        matching = _matching(pattern, paths, f"lora.targets: {pattern}", fix)
        if not matching:
            near = get_close_matches(pattern, presets, 1)
            known = f"Did you mean {near[0]}? {known}" if near else known
            raise AdapterError(
                "targets-match-nothing",
                f"No module of {component} matches the expression.",
                where=f"lora.targets: {pattern}",
                fix=f"{known} Module names look like {', '.join(_spread(paths))}.",
            )
        chosen[component] = matching
    return chosen


def overrides_of(lora: AdapterSection, names: Iterable[str]) -> Mapping[str, ModuleOverride]:
    """Return the overrides of the adapted modules, keyed by module name.

    If several entries of ``lora.overrides`` match a name, the first applies. Modules without a match are not in the
    result.

    Raises:
        AdapterError: overrides-invalid, overrides-endless, overrides-match-nothing.
    """
    names = list(names)
    found: dict[str, ModuleOverride] = {}
    for number, override in enumerate(lora.overrides):
        where = f"lora.overrides[{number}].match: {override.match}"
        fix = f"Names of adapted modules look like {', '.join(_spread(names))}."
        matching = _matching(override.match, names, where, fix, "overrides")
        if not matching:
            like = get_close_matches(override.match, names, EXAMPLES, cutoff=0.0)
            fix = f"Names of adapted modules are {', '.join(like)} and others."
            raise AdapterError(
                "overrides-match-nothing", "No adapted module matches the expression.", where=where, fix=fix
            )
        if not set(matching) - found.keys():
            what = "Earlier entries already apply to all modules that match."
            raise AdapterError(
                "overrides-match-nothing", what, where=where, fix="Move the entry with fewer matches to the front."
            )
        found = dict.fromkeys(matching, override) | found
    return found


def sections_of(lora: AdapterSection, shapes: Mapping[str, Sequence[int]]) -> dict[str, AdapterSection]:
    """Return each adapted module's ``lora`` section with the module's own rank and alpha, keyed by module name.

    ``shapes``: shapes of the modules' weights, keyed by module name.

    Raises:
        AdapterError: conv-match-nothing, or an error of ``overrides_of``.
    """
    if (
        isinstance(lora, LoraSection)
        and (lora.conv_rank or lora.conv_alpha)
        and not any(map(has_kernel, shapes.values()))
    ):
        raise AdapterError(
            "conv-match-nothing",
            "No adapted module is a convolution with a kernel larger than 1 x 1.",
            where="lora.conv_rank and lora.conv_alpha",
            fix="Remove both keys, or set lora.targets to modules that are convolutions, such as attention-mlp-conv.",
        )
    overrides = overrides_of(lora, shapes)
    return {name: lora.at(overrides.get(name), shape) for name, shape in shapes.items()}


def _matching(pattern: str, names: list[str], where: str, fix: str, code: str = "targets") -> list[str]:
    """Return the names that a regular expression matches completely.

    Raises:
        AdapterError: ``code``-invalid, ``code``-endless.
    """
    try:
        compiled = regex.compile(pattern)
        return [name for name in names if compiled.fullmatch(name, timeout=MATCHING_S)]
    except (regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(
            f"{code}-invalid", f"This is not a regular expression: {error}.", where=where, fix=fix
        ) from error
    except TimeoutError as error:
        raise AdapterError(
            f"{code}-endless",
            f"Matching a module's name took more than {MATCHING_S:g} s: the expression backtracks too much.",
            where=where,
            fix=f"Write it without repetitions inside repetitions, such as (.*)*. {fix}",
        ) from error


def either(paths: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these paths."""
    return "|".join(re.escape(path) for path in sorted(paths))


def _spread(paths: list[str]) -> list[str]:
    """Return up to EXAMPLES of the names, evenly spread over the list."""
    step = max(1, len(paths) // EXAMPLES)
    return paths[step // 2 :: step][:EXAMPLES]
