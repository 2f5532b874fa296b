"""Rules of a family for shared keys: unread keys are refused, and sizes have to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lora_rocm.errors import Problem
from lora_rocm.families.spec import FamilySpec
from lora_rocm.recipe.schema import TEXT_KEY, TOKENS_KEY
from lora_rocm.recipe.sections import MAX_BUCKET_STEP, MAX_SIDE_PX
from lora_rocm.recipe.yaml_tree import Key

SIDES: dict[Key, int] = {
    ("data", "bucket_step"): MAX_BUCKET_STEP,
    ("sample", "width"): MAX_SIDE_PX,
    ("sample", "height"): MAX_SIDE_PX,
}
"""Keys of lengths in pixels that have to fit the family, with their upper limits."""
PRECISION: Key = ("train", "mixed_precision")


def family_problems(data: Any, where: Callable[[Key], str], spec: FamilySpec) -> Iterator[Problem]:
    """Problems with keys that the family does not read and with sizes that it cannot use.

    Args:
        data: unvalidated data of a recipe file. Values of a wrong type are left to pydantic.
        where: turns a key into "file.yaml:12 data.bucket_step".
        spec: the recipe's family.
    """
    for key in given_unread(data, spec):
        yield Problem(where(key), f"this key is not read by {spec.title}", "Remove it.")
    step = spec.shapes.multiple_px
    for key, most in SIDES.items():
        value = _get(data, key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most and value % step:
            near = [str(side) for side in (value // step * step, -(-value // step) * step) if 0 < side <= most]
            what = f"has to be a multiple of {step} for {spec.title}, got {value}"
            yield Problem(where(key), what, f"Take {' or '.join(near)}." if near else "")
    if _get(data, PRECISION) == "fp16" and not spec.takes_fp16:
        what = f"products of {spec.title} have factors that are too large for fp16"
        yield Problem(where(PRECISION), what, "Take auto, bf16 or no.")
    if _get(data, ("lora", TEXT_KEY)) is True and not spec.text_components:
        what = f"no text encoder of {spec.title} can be trained"
        yield Problem(where(("lora", TEXT_KEY)), what, "Remove it, or set it to false.")
    if _get(data, ("lora", TOKENS_KEY)) and not spec.embedding_keys:
        what = f"no text encoder of {spec.title} can get new tokens"
        yield Problem(where(("lora", TOKENS_KEY)), what, "Remove it.")


def given_unread(data: Any, spec: FamilySpec) -> Iterator[Key]:
    """The given keys that the family does not read, also in ``data.watched`` and the entries of ``data.sources``."""
    for name in sorted(spec.unread):
        section, _, leaf = name.partition(".")
        sources = _get(data, (section, "sources")) if section == "data" else None
        places = [
            (section,),
            (section, "watched"),
            *((section, "sources", i) for i in range(len(sources) if isinstance(sources, list) else 0)),
        ]
        for place in places:
            found = _get(data, place)
            if isinstance(found, dict) and leaf in found:
                yield (*place, leaf)


def without_unread(data: dict[str, Any], spec: FamilySpec) -> dict[str, Any]:
    """Recipe data without the keys that the family does not read."""
    for *place, leaf in list(given_unread(data, spec)):
        _get(data, tuple(place)).pop(leaf)
    return data


def _get(data: Any, key: Key) -> Any:
    for part in key:
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = data[part] if isinstance(data, list) and isinstance(part, int) else None
    return data
