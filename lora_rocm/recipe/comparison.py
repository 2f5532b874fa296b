"""Compare recipes: some values must stay equal when a run is resumed, and some must be equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from lora_rocm.errors import Problem
from lora_rocm.recipe.explain import shown
from lora_rocm.recipe.optim_sections import OptimSection
from lora_rocm.recipe.process_sections import TimeoutsSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import AddedLater, ModelSection
from lora_rocm.recipe.source_sections import SourceOptions
from lora_rocm.recipe.yaml_tree import Key, dotted

# Ranks may differ in these keys: they define where and how each rank does the same work.
OF_A_PROCESS = frozenset({
    "cache.dir", "output.dir", "train.gradient_checkpointing", "runtime.device", "runtime.workers",
    "runtime.worker_timeout_s", "runtime.persistent_workers", "runtime.workers_on_windows", "runtime.pin_memory",
    "runtime.graphs", "runtime.compile", "runtime.memory", "runtime.profile", "runtime.self_test",
    "runtime.max_restarts", "runtime.threads", *(f"timeouts.{name}" for name in TimeoutsSection.model_fields),
})  # fmt: skip


LATER: dict[str, Any] = {
    f"{section}.{name}": info.default
    for section, options in (("model", ModelSection), ("data", SourceOptions), ("optim", OptimSection))
    for name, info in options.model_fields.items()
    if AddedLater() in info.metadata
}
"""Default of each key that was added to the recipe after 2026-11-27. Such keys are marked ``AddedLater``.

The fingerprints of earlier checkpoints do not contain these keys. A fingerprint therefore omits a key at its default.
"""


def fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of all values that must not change when a run is resumed."""
    return hashlib.sha256(json.dumps(fixed_values(recipe), sort_keys=True).encode("utf-8")).hexdigest()


def fixed_values(recipe: Recipe) -> dict[str, Any]:
    """Return all values that must not change when a run is resumed, as JSON values by dotted key."""
    values = {dotted(key): value for key, value, may_change in _leaves(recipe) if not may_change}
    values = {key: value for key, value in values.items() if key not in LATER or value != LATER[key]}
    of_data = {key.removeprefix("data.") for key in LATER if key.startswith("data.")}
    values["data.sources"] = [  # in an entry the default is None
        {key: value for key, value in source.items() if key not in of_data or value is not None}
        for source in values["data.sources"]
    ]
    return values


def shared_values(recipe: Recipe) -> dict[str, Any]:
    """Return all values that must be equal on all ranks, as JSON values by dotted key."""
    return {dotted(key): value for key, value, _ in _leaves(recipe) if dotted(key) not in OF_A_PROCESS}


def resume_differences(old: Recipe, new: Recipe) -> list[Problem]:
    """Return one problem for each value that differs between two recipes although a resume must not change it.

    Args:
        old: recipe of the run.
        new: recipe with which the run is to be resumed.
    """
    after = {key: value for key, value, _ in _leaves(new)}
    return [  # a key of only one recipe belongs to another kind, and the key that names the kind differs too
        Problem(dotted(key), f"{shown(before)} -> {shown(after[key])}")
        for key, before, may_change in _leaves(old)
        if not may_change and key in after and before != after[key]
    ]


def all_differences(old: Recipe, new: Recipe) -> dict[str, tuple[object, object]]:
    """Return (old, new) of each value that differs between two recipes, by dotted key. A missing key counts as null."""
    before, after = ({dotted(key): value for key, value, _ in _leaves(recipe)} for recipe in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _leaves(section: BaseModel, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Key, Any, bool]]:
    """Yield (key, JSON value, whether a resume may change it) for each key that is not itself a section."""
    for name, info in type(section).model_fields.items():
        value, extra = getattr(section, name), info.json_schema_extra
        may_change = isinstance(extra, dict) and extra.get("resume") == "may change"
        if isinstance(value, BaseModel):
            yield from ((key, leaf, may_change or may) for key, leaf, may in _leaves(value, (*prefix, name)))
        else:
            yield (*prefix, name), section.model_dump(mode="json", include={name})[name], may_change
