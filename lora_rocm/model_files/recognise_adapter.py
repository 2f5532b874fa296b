"""Recognises an adapter file: its kind, and its model family by the names and widths of modules.

The marks are in ``recognise_adapter.toml``.

It knows the names that kohya-ss/sd-scripts, musubi-tuner, diffusers, ai-toolkit and ComfyUI write (sources:
``comfy/lora.py``, ``comfy/lora_convert.py``). Dots and underscores are treated as equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Literal

from lora_rocm.foundation.tables import read_table
from lora_rocm.model_files.models import Shapes

SAMPLED = 4000
"""Maximum number of names that are checked per file. A LoRA's further names only repeat the pattern for other blocks.
"""
FACTOR = re.compile(r"[._](?:lora[._](down|up|A|B)\.(?:default\.)?weight|(?:hada_w1|lokr_w[12])(?:_([ab]))?)$")
"""Matches the end of a factor's name: of a LoRA, of the first product of a LoHa, or of a LoKr."""
OF_MANY = re.compile(r"^(lora_te|text_encoder|clip_[lg]\.)|visual|vision")
"""Matches module names that do not identify a family: several families share the component, or a language model has
it.
"""
ROWS, COLUMNS = ("up", "B", "a"), ("down", "A", "b")
"""Roles of factors that only have a side for a module's outputs, and of factors that only have a side for its inputs.
"""


@dataclass(frozen=True)
class AdapterPattern:
    """A kind of adapter, and the regular expression that identifies it when found in a tensor name."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Width:
    """A condition on the width of a module.

    pattern: regular expression. The first module that matches it is tested.
    side: the dimension that is tested.
    sizes: accepted widths. 0 accepts an unknown width.
    """

    pattern: str
    side: Literal["inputs", "outputs"]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """One or more model families with the same module names.

    families: values of ``model.family``.
    title: display name.
    pattern: regular expression that has to be found in a name (as ``_plain`` returns it).
    without: regular expression that must not be found in any name.
    """

    families: tuple[str, ...]
    title: str
    pattern: str
    without: str = ""
    widths: tuple[Width, ...] = ()


@dataclass(frozen=True)
class FamilyMetadata:
    """A model family, recognised by the start of two metadata fields, compared in lower case.

    base_versions: starts of ``ss_base_model_version``. architectures: starts of ``modelspec.architecture``.
    """

    family: str
    base_versions: tuple[str, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class AdapterTable:
    """The table ``recognise_adapter.toml``."""

    kinds: tuple[AdapterPattern, ...]
    metadata: tuple[FamilyMetadata, ...]
    origins: tuple[Origin, ...]


@cache
def _table() -> AdapterTable:
    return read_table(Path(__file__).with_name("recognise_adapter.toml"), AdapterTable)


def kind_of(names: Iterable[str]) -> str:
    """Return the kinds of adapter in a file with these tensor names ("LoRA and DoRA"), or "" if there are none."""
    text = "\n".join(names)
    return " and ".join(kind.name for kind in _table().kinds if re.search(kind.pattern, text, re.MULTILINE))


def origin_of(names: Iterable[str], shapes: Shapes | None = None) -> Origin | None:
    """Return the row of the table that matches these names; None if no row matches.

    Args:
        names: names of tensors or modules.
        shapes: shapes of the file's tensors, or None if unknown.
    """
    text = "\n".join(map(_plain, islice(names, SAMPLED)))
    widths = _widths(shapes or {})
    for origin in _table().origins:
        found = re.search(origin.pattern, text, re.MULTILINE)
        if found and not (origin.without and re.search(origin.without, text)):
            if all(_holds(condition, widths) for condition in origin.widths):
                return origin
    return None


def foreign_name(names: Iterable[str], families: Collection[str]) -> tuple[str, Origin] | None:
    """Return the first name that belongs only to other families, with its origin; None if there is no such name."""
    own = [re.compile(origin.pattern) for origin in _table().origins if not set(families).isdisjoint(origin.families)]
    for name in islice(names, SAMPLED):
        if not OF_MANY.search(name) and not any(pattern.search(_plain(name)) for pattern in own):
            if (other := origin_of([name])) is not None:
                return name, other
    return None


def families_of(shapes: Shapes, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the families to which an adapter file may belong.

    The names decide. If several families share them, the metadata narrow the choice.
    """
    return families_with(origin_of(shapes, shapes), metadata)


def families_with(origin: Origin | None, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the families to which an adapter file of this origin may belong."""
    named = origin.families if origin is not None else ()
    version = metadata.get("ss_base_model_version", "").lower()
    architecture = metadata.get("modelspec.architecture", "").lower()
    said = tuple(
        row.family
        for row in _table().metadata
        if version.startswith(row.base_versions) or architecture.startswith(row.architectures)
    )
    return named if len(named) == 1 else tuple(name for name in said if not named or name in named) or named


def _plain(name: str) -> str:
    """Return a name without diffusers' prefix "transformer.", and with dots replaced by "_"."""
    return name.removeprefix("transformer.").replace(".", "_")


def _widths(shapes: Shapes) -> dict[str, dict[str, int]]:
    """Return the widths of modules, keyed by "inputs" or "outputs" and then by module name (see ``_plain``)."""
    widths: dict[str, dict[str, int]] = {"inputs": {}, "outputs": {}}
    for name, shape in islice(shapes.items(), SAMPLED):
        factor = FACTOR.search(name)
        if factor is not None and len(shape) > 1:
            module, role = _plain(name[: factor.start()]), factor[1] or factor[2]
            for side, axis, others in (("outputs", 0, COLUMNS), ("inputs", 1, ROWS)):
                if role not in others:
                    widths[side][module] = widths[side].get(module, 1) * shape[axis]
    return widths


def _holds(condition: Width, widths: dict[str, dict[str, int]]) -> bool:
    of_side = widths[condition.side].items()
    return next((size for module, size in of_side if re.search(condition.pattern, module)), 0) in condition.sizes
