"""Recognises adapter files: their kind, and the model family by the names and widths of modules (``adapters.toml``).

Knows the names that kohya-ss/sd-scripts, musubi-tuner, diffusers, ai-toolkit and ComfyUI write (``comfy/lora.py``,
``comfy/lora_convert.py``); dots and underscores are treated as equal.
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
"""Maximum number of names inspected per file. Further names of a LoRA are repetitions."""
FACTOR = re.compile(r"[._](?:lora[._](down|up|A|B)\.(?:default\.)?weight|(?:hada_w1|lokr_w[12])(?:_([ab]))?)$")
"""The end of the name of a factor of a LoRA, of a LoHa's first product, or of a LoKr's Kronecker product."""
OF_MANY = re.compile(r"^(lora_te|text_encoder|clip_[lg]\.)|visual|vision")
"""Names of components that families share, or that come with a language model."""
ROWS, COLUMNS = ("up", "B", "a"), ("down", "A", "b")
"""Factors that have only the rows of a product, its outputs, and those that have only its columns."""


@dataclass(frozen=True)
class AdapterPattern:
    """A kind of adapter, by a regular expression that is found in a tensor's name."""

    name: str
    pattern: str


@dataclass(frozen=True)
class Width:
    """A condition on modules: the first one that matches has one of these numbers of inputs or outputs; 0: unknown."""

    pattern: str
    side: Literal["inputs", "outputs"]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Origin:
    """One or more families with distinctive module names.

    families: values of ``model.family``. title: display name. pattern: regular expression to find in the names that
    ``_plain`` returns. without: regular expression that must not be found in any name.
    """

    families: tuple[str, ...]
    title: str
    pattern: str
    without: str = ""
    widths: tuple[Width, ...] = ()


@dataclass(frozen=True)
class FamilyMetadata:
    """A family, by the starts of ``ss_base_model_version`` and ``modelspec.architecture`` in small letters."""

    family: str
    base_versions: tuple[str, ...]
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class AdapterTable:
    """The file."""

    kinds: tuple[AdapterPattern, ...]
    metadata: tuple[FamilyMetadata, ...]
    origins: tuple[Origin, ...]


@cache
def _table() -> AdapterTable:
    return read_table(Path(__file__).with_name("adapters.toml"), AdapterTable)


def kind_of(names: Iterable[str]) -> str:
    """Return the kinds of adapter in a file with these tensors ("LoRA and DoRA"); empty if it holds none."""
    text = "\n".join(names)
    return " and ".join(kind.name for kind in _table().kinds if re.search(kind.pattern, text, re.MULTILINE))


def origin_of(names: Iterable[str], shapes: Shapes | None = None) -> Origin | None:
    """Return the origin that matches these names; None if they are ambiguous.

    Args:
        names: names of tensors or modules.
        shapes: shapes of the file's tensors, if they are known.
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
    """Return a name that no adapter of these families has, and its origin; None if all may belong to one of them."""
    own = [re.compile(origin.pattern) for origin in _table().origins if not set(families).isdisjoint(origin.families)]
    for name in islice(names, SAMPLED):
        if not OF_MANY.search(name) and not any(pattern.search(_plain(name)) for pattern in own):
            if (other := origin_of([name])) is not None:
                return name, other
    return None


def families_of(shapes: Shapes, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the possible families of an adapter file: by its names, and by its metadata where names leave a choice."""
    origin = origin_of(shapes, shapes)
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
    """Return a name without diffusers' name of the component, and with dots as ``_``."""
    return name.removeprefix("transformer.").replace(".", "_")


def _widths(shapes: Shapes) -> dict[str, dict[str, int]]:
    """Return side -> module (as ``_plain`` spells it) -> number of inputs or outputs."""
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
