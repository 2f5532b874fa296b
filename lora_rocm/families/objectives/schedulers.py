"""Checks that a base's scheduler describes the same noise as the objective adds (``schedulers.toml``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lora_rocm.base_models.loading import BaseSource
from lora_rocm.errors import ModelError
from lora_rocm.families.objectives.flow import shift_of_resolution
from lora_rocm.foundation.tables import read_table
from lora_rocm.foundation.terminal_text import printable
from lora_rocm.model_files.config_file import DOWNLOAD_AGAIN, read_config
from lora_rocm.model_files.models import index_of

BETA_KEYS = ("beta_start", "beta_end", "beta_schedule")
"""Config keys that define the betas, unless ``trained_betas`` lists the betas themselves."""
MOST = {"shift": 1000, "base_shift": 10, "max_shift": 10, "base_image_seq_len": 1 << 20, "max_image_seq_len": 1 << 20}
"""Maximum plausible values of the numbers in a flow matching scheduler's config."""
TOKENS = (1, 1 << 16)
"""Shortest and longest image, in tokens, for which the shift has to be a valid number."""


@dataclass(frozen=True)
class SchedulerClass:
    """A scheduler class of diffusers, with its default betas."""

    name: str
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"


@dataclass(frozen=True)
class FixedKey:
    """A key of a scheduler config, and the values that fit an objective's noise. The value null always fits."""

    key: str
    texts: tuple[str, ...] = ()
    number: float | None = None
    flag: bool | None = None

    def allows(self, value: object) -> bool:
        if isinstance(value, bool):
            return value is self.flag
        return value is None or value in self.texts or (self.number is not None and value == self.number)


@dataclass(frozen=True)
class SchedulerKind:
    """The schedulers that fit the noise of one objective."""

    name: str
    title: str
    used: tuple[str, ...]
    sampling: tuple[str, ...]
    fixed: tuple[FixedKey, ...]
    classes: tuple[SchedulerClass, ...]


@dataclass(frozen=True)
class SchedulerTable:
    """The contents of ``schedulers.toml``."""

    kinds: tuple[SchedulerKind, ...]


@cache
def _table() -> SchedulerTable:
    return read_table(Path(__file__).with_name("schedulers.toml"), SchedulerTable)


def kind_named(name: Literal["ddpm", "flow"]) -> SchedulerKind:
    """Return the table's entry for an objective."""
    return next(kind for kind in _table().kinds if kind.name == name)


def used_values(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a scheduler's config that define the noise of an objective."""
    kinds = _table().kinds
    used = {key for kind in kinds for key in (*kind.used, *(row.key for row in kind.fixed))}
    return {key: value for key, value in config.items() if key in used and value is not None}


def scheduler_class(source: BaseSource, kind: SchedulerKind) -> SchedulerClass:
    """Return the scheduler class of a base, or DDPM's if neither the model index nor the scheduler config names one.

    diffusers loads the class named in the index. Other programs load the class named in the config. So both have to be
    in the table.

    Raises:
        ModelError: scheduler-unsupported, or a config cannot be read.
    """
    named: dict[str, object] = {}
    index = index_of(source.folder)
    entry = read_config(index).get("scheduler") if index is not None else None
    if isinstance(entry, list) and len(entry) == 2 and entry[1] is not None:
        named[f"{index}: scheduler"] = entry[1]
    own = source.config("scheduler").values.get("_class_name")
    if own is not None:
        named[f"{source.config_path('scheduler')}: _class_name"] = own
    found = {place: next((each for each in kind.classes if each.name == name), None) for place, name in named.items()}
    for place, known in found.items():
        if known is None:
            raise ModelError(
                "scheduler-unsupported",
                f"The scheduler of the base is {printable(str(named[place]))[:80]!r}, which is not supported here. "
                f"This family is trained with {kind.title}.",
                where=place,
                fix=f"Use another base. Known schedulers: {', '.join(each.name for each in kind.classes)}.",
            )
    return next((each for each in found.values() if each is not None), SchedulerClass(""))


def _class_notice(source: BaseSource, counts: str) -> tuple[str, ...]:
    """Return a notice if the scheduler config does not name its class."""
    if source.config("scheduler").values.get("_class_name") is not None:
        return ()
    return (f"The scheduler config of the base does not name its class (_class_name), so it is read as {counts}.",)


def require_known_keys(source: BaseSource, kind: SchedulerKind, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse values that describe different noise than the objective's. Returns a notice about unknown keys.

    Raises:
        ModelError: scheduler-unsupported.
    """
    path = source.config_path("scheduler")
    for row in kind.fixed:
        if not row.allows(config.get(row.key)):
            raise ModelError(
                "scheduler-unsupported",
                f"The scheduler config of the base has {row.key} = "
                f"{printable(str(config[row.key]))[:40]}, which describes different noise than "
                f"{kind.title} in this program.",
                where=f"{path}: {row.key}",
                fix="Use another base.",
            )
    known = {*kind.used, *kind.sampling, *(row.key for row in kind.fixed)}
    unknown = sorted(key for key in config if key not in known and not key.startswith("_"))
    if not unknown:
        return ()
    named = ", ".join(printable(key)[:80] for key in unknown[:3])
    return (f"The scheduler config of the base has unknown keys, which are ignored ({len(unknown)}): {named}.",)


def completed(source: BaseSource, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DDPM scheduler config in which diffusers' defaults replace missing betas and a missing prediction type.

    Raises:
        ModelError: see ``scheduler_class``.
    """
    own = scheduler_class(source, kind_named("ddpm"))
    missing = {"prediction_type": "epsilon"} if "prediction_type" not in config else {}
    if config.get("trained_betas") is None:
        missing |= {key: getattr(own, key) for key in BETA_KEYS if config.get(key) is None}
    return {**config, **missing}


def ddpm_notices(source: BaseSource, published: Mapping[str, Any], chosen_prediction: bool) -> tuple[str, ...]:
    """Return notices about missing keys of a DDPM scheduler config, which are replaced by diffusers' defaults.

    Args:
        source: the base.
        published: the base's scheduler config.
        chosen_prediction: whether the recipe or the base's file determines the prediction type.

    Raises:
        ModelError: see ``scheduler_class`` and ``require_known_keys``.
    """
    full, notices = completed(source, published), require_known_keys(source, kind_named("ddpm"), published)
    notices = (*_class_notice(source, "a DDPM schedule"), *notices)
    if betas := [key for key in BETA_KEYS if full.get(key) != published.get(key)]:
        values = ", ".join(f"{key}: {full[key]}" for key in betas)
        notices += (
            "The scheduler config of the base does not specify the betas (noise per timestep), so "
            f"diffusers' defaults are used ({values}). If the base was trained with different noise, "
            "training damages it.",
        )
    if "prediction_type" not in published and not chosen_prediction:
        notices += (
            "The scheduler config of the base has no prediction_type, so epsilon (prediction of the "
            "noise) is assumed, as in diffusers. For a base that predicts the velocity, set "
            "model.prediction_type: v_prediction.",
        )
    return notices


def check_flow(source: BaseSource) -> tuple[str, ...]:
    """Refuse a base unless it has a flow matching scheduler with a valid shift. Returns notices.

    Raises:
        ModelError: scheduler-unsupported, scheduler-unreadable, or a config cannot be read.
    """
    kind, config, path = kind_named("flow"), source.config("scheduler").values, source.config_path("scheduler")
    scheduler_class(source, kind)
    notices = (*_class_notice(source, "flow matching"), *require_known_keys(source, kind, config))
    for key, problem in _flow_problems(config):
        raise ModelError(
            "scheduler-unreadable",
            f"The shift of the base's noise levels cannot be computed: {problem}.",
            where=f"{path}: {key}",
            fix=DOWNLOAD_AGAIN,
        )
    if config.get("shift") is None and not config.get("use_dynamic_shifting"):
        notices += ("The scheduler config of the base has no shift, so 1 is used, as in diffusers.",)
    return notices


def _flow_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each faulty key of a flow matching scheduler's config, with a description of the fault."""
    is_dynamic = config.get("use_dynamic_shifting")
    if not isinstance(is_dynamic, bool | None):
        yield "use_dynamic_shifting", "use_dynamic_shifting is neither true nor false"
    for key, most in MOST.items():
        value = config.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value <= most):
            yield key, f"{key} is {printable(str(value))[:40]}, but has to be a number above 0 and at most {most}"
            return
    try:
        shifts = [shift_of_resolution(config, tokens) for tokens in TOKENS]
    except ArithmeticError:  # two equal lengths, or two so near that the line through them is too steep
        shifts = [0.0]
    if not all(0 < shift < math.inf for shift in shifts):
        yield "max_image_seq_len", "no line passes through its two lengths and their shifts"
