"""Detects the model family of a LoRA file from its tensor names (``origin.toml``), so that an error can name it.

Recognises the names that kohya-ss/sd-scripts, musubi-tuner, diffusers, ai-toolkit and ComfyUI write (``comfy/lora.py``,
``comfy/lora_convert.py``); dots and underscores are treated as equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from lora_rocm.families.registry import PRODUCT
from lora_rocm.foundation.tables import read_rows

SAMPLED = 4000
"""Maximum number of names inspected per file. No LoRA has more names that are not repetitions."""


@dataclass(frozen=True)
class Origin:
    """One or more families with distinctive module names.

    families: values of ``model.family``. title: display name. pattern: regular expression to find in the names, with
    dots as ``_``. without: regular expression that must not be found in any name.
    """

    families: tuple[str, ...]
    title: str
    pattern: str
    without: str = ""


@cache
def _origins() -> tuple[Origin, ...]:
    return read_rows(Path(__file__).with_name("origin.toml"), Origin)


def origin_of(names: Iterable[str]) -> Origin | None:
    """Return the origin that matches these tensor names; None if the names are ambiguous."""
    text = "\n".join(name.replace(".", "_") for name in islice(names, SAMPLED))
    for origin in _origins():
        if re.search(origin.pattern, text, re.MULTILINE) and not (origin.without and re.search(origin.without, text)):
            return origin
    return None


def foreign(names: Iterable[str], family: str) -> Origin | None:
    """Return the origin of the names if it excludes ``family``; None if it includes it or is unknown."""
    origin = origin_of(names)
    return None if origin is None or family in origin.families else origin


def title_of(family: str) -> str:
    """Return the display name of a family."""
    return PRODUCT[family].title if family in PRODUCT else family
