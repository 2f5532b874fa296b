"""The environment of all templates. Only templates write markup, and escape every text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text, number_text, rate_text, size_text, time_text
from lora_rocm.page_parts.texts import phase_words, t

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")


def new_environment(folder: Path, shown: Callable[[object], object]) -> Environment:
    """Return an environment for the templates in a folder and the shared ones.

    Args:
        folder: the folder of templates.
        shown: changes each value that a template shows; see ``legible_value``.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here, because few commands write HTML

    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.globals["t"] = t
    made.globals["phase_words"] = phase_words
    made.filters |= {
        "size": size_text,
        "number": number_text,
        "duration": time_text,
        "rate": rate_text,
        "counted": count_text,
        "exact": escape,  # of a text that the user edits: saving it must not change it
    }
    return made


def legible_value(value: object) -> object:
    """Escape controls and bidirectional marks in a text, so that a file's name cannot imitate another."""
    if isinstance(value, str | PurePath) and not isinstance(value, Markup):
        return legible(str(value), keep="\n\t")
    return "" if value is None else value
