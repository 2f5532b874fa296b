"""Writes the folders of another trainer's data to ``data``, or as entries to ``data.sources``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from lora_rocm.importing.setting import Value
from lora_rocm.importing.translator import RecipeValue, Translator
from lora_rocm.importing.value_maps import number
from lora_rocm.recipe.schema import DataSection
from lora_rocm.recipe.source_sections import DataSource

Source = Mapping[str, RecipeValue]
"""Maps the keys of an entry of ``data.sources`` to their values."""


def take_sources(t: Translator, sources: Sequence[Source]) -> None:
    """Write the sources to the recipe.

    A key with the same value in all sources is written to ``data``. A single folder becomes ``data.path``. If a
    source lacks a key, lora-rocm's default applies to it.
    """
    keys = dict.fromkeys(key for source in sources for key in source)
    shared = [
        key
        for key in keys
        if key in DataSection.model_fields
        and all(key in source and source[key].value == sources[0][key].value for source in sources)
    ]
    is_single = len(sources) == 1 and all(key in DataSection.model_fields for key in keys)
    for key in shared:
        if is_single or key != "path":
            every = [setting for source in sources for setting in source[key].settings]
            t.take(f"data.{key}", sources[0][key].value, *every, note=sources[0][key].note)
    if is_single:
        return
    for index, source in enumerate(sources):
        for key, given in source.items():
            if key == "path" or key not in shared:
                assert key in DataSource.model_fields, key
                t.take(f"data.sources[{index}].{key}", given.value, *given.settings, note=given.note)


def side_of(value: Value) -> int | None:
    """Return the side of the square that has the area of a resolution, or None if the value is not a resolution.

    A resolution is a value such as 1024, "1024x768" or [1024, 768].
    """
    parts = value if isinstance(value, list) else re.split(r"[,x]", str(value).lower())
    sides = [number(each) for each in parts]
    if not sides or len(sides) > 2 or any(side is None or side < 1 for side in sides):
        return None
    return round(math.sqrt((sides[0] or 0.0) * (sides[-1] or 0.0)))


def ratio_of(value: Value) -> float | None:
    """Return the ratio of width to height for a value such as 1.5 or [768, 512]; None for any other value."""
    sides = [number(each) for each in value] if isinstance(value, list) else [number(value), 1.0]
    if len(sides) != 2 or any(side is None or side <= 0 for side in sides):
        return None
    return (sides[0] or 0.0) / (sides[1] or 1.0)
