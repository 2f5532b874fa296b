"""The page of the events of a run, generated from their classes."""

from __future__ import annotations

import re
import types
import typing
from inspect import getdoc
from typing import Annotated, Any, get_args, get_origin

from lora_rocm.json_reference import attributes, summary
from lora_rocm.rundir import event_types
from lora_rocm.rundir.event_types import RUN_EVENTS, Event
from scripts.docs_tables import table

HEAD = """\
# Events

Everything that happens in a run is a line of `events.jsonl` in the run directory; the events of the supervisor are in
`events.supervisor.jsonl`. Each line is one JSON object. `lora-rocm train --json` prints the same lines as they come.
This page is generated from the classes of the events: `python -m scripts.docs_pages`.

Readers should ignore types and fields that they do not know: a newer version may have more. A number that is not
finite is null.

Every event has these fields:

| field | type | meaning |
| --- | --- | --- |
| `type` | text | the name of its section below |
| `time` | number | seconds since 1970 |
| `session` | whole number | number of the worker's start in this run directory |
"""
NAMES: dict[Any, str] = {
    event_types.Whole: "whole number",
    event_types.Number: "number",
    event_types.NumberOrNull: "number or null",
    event_types.Text: "text",
    event_types.Problem: "`where`, `what` and `fix`",
    event_types.Anything: "anything",
    bool: "true or false",
    type(None): "null",
}


def page() -> str:
    """The page."""
    return "\n".join([HEAD, *map(_section, RUN_EVENTS)])


def _section(kind: type[Event]) -> str:
    said = attributes(getdoc(kind) or "")
    hints = typing.get_type_hints(kind, include_extras=True)
    rows = [
        (f"`{name}`", _type(hints[name]), _plain(said.get(name, "")))
        for name in kind.model_fields
        if name not in Event.model_fields
    ]
    about = _plain(summary(kind))
    return f"## {kind.type}\n\n{about}\n\n{table(('field', 'type', 'meaning'), rows)}\n"


def _plain(text: str) -> str:
    """A docstring's words, without the names of code in brackets."""
    return re.sub(r" ?\(``[\w.]+``\)", "", text).replace("``", "`")


def _type(hint: Any) -> str:
    for known, name in NAMES.items():
        if hint == known:
            return name
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type, arguments))
    if origin is Annotated:
        return _type(arguments[0])
    if origin is list:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"object of {_type(arguments[1])}"
    raise TypeError(hint)
