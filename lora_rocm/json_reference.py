"""The reference page of the commands' ``--json`` output, generated from the classes of their results.

``python -m scripts.docs_pages`` writes it to docs/reference/json.md; a test fails if the page is out of date.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from lora_rocm.cache_store.maintenance import CachePruned, CacheStats, CacheVerified
from lora_rocm.commands.bench import BenchResult
from lora_rocm.commands.chat import ChatResult
from lora_rocm.commands.check import CheckResult
from lora_rocm.commands.compare import CompareResult
from lora_rocm.commands.doctor import DoctorResult
from lora_rocm.commands.documents import InspectDocument
from lora_rocm.commands.env import EnvResult
from lora_rocm.commands.import_config import ImportResult
from lora_rocm.commands.new import NewResult, RecipesResult
from lora_rocm.commands.output import Failed, ForgetResult
from lora_rocm.commands.plan import PlanResult
from lora_rocm.commands.prepare import PrepareResult
from lora_rocm.commands.push import PushResult
from lora_rocm.commands.queue import QueueResult
from lora_rocm.commands.queue_run import QueueRunResult
from lora_rocm.commands.report import ReportResult
from lora_rocm.commands.runs import RunsResult
from lora_rocm.commands.sample_export import ExportResult, SampleResult
from lora_rocm.commands.start_run import RunResult
from lora_rocm.commands.status import StatusDocument
from lora_rocm.commands.tune import TuneResult
from lora_rocm.ui.command import UiResult

RESULTS: dict[str, type] = {
    "train": RunResult,
    "resume": RunResult,
    "demo": RunResult,
    "fork": RunResult,
    "ui": UiResult,
    "import": ImportResult,
    "recipes": RecipesResult,
    "new": NewResult,
    "check": CheckResult,
    "plan": PlanResult,
    "sample": SampleResult,
    "chat": ChatResult,
    "compare": CompareResult,
    "export": ExportResult,
    "prepare": PrepareResult,
    "push": PushResult,
    "tune": TuneResult,
    "queue add": QueueResult,
    "queue list": QueueResult,
    "queue run": QueueRunResult,
    "queue remove": QueueResult,
    "queue move": QueueResult,
    "status": StatusDocument,
    "runs": RunsResult,
    "inspect": InspectDocument,
    "report": ReportResult,
    "doctor": DoctorResult,
    "env": EnvResult,
    "forget": ForgetResult,
    "cache stats": CacheStats,
    "cache verify": CacheVerified,
    "cache prune": CachePruned,
    "bench transfer": BenchResult,
    "bench compute": BenchResult,
    "bench loader": BenchResult,
    "bench step": BenchResult,
}
"""Class of each command's JSON document. ``schema`` is missing because its document is a JSON Schema."""
FOLLOWS = ("train", "resume", "demo", "fork")
PLAIN = {
    str: "string",
    Path: "string",
    bool: "true or false",
    int: "whole number",
    float: "number",
    Any: "anything",
    object: "anything",
}
INTRODUCTION = """\
---
search:
  boost: 0.5
---

# What commands print as JSON

This page is generated from the classes of the results: `python -m scripts.docs_pages`.

Every command takes `--json`. Standard output is then exactly one JSON document, in ASCII; progress, and errors as
text, go to standard error. `train`, `resume`, `fork` and `demo` print JSON lines: each event of the run as it occurs,
as in `events.jsonl` (every event has a `type`). The last line is the document, which has no `type`. `schema --json`
prints the JSON Schema of recipes. The exit code is the same as without `--json`. With `--quiet` only the result is
printed, as text.

A command that ends with an error prints the document `Failed`. A wrong command line also prints it, with the code
`usage` and the exit code 2. `check`, `plan` and `tune` may have results even if they fail: their documents have an
`error` field. `chat --json` needs `--prompt`. `bench --output FILE` writes the same document to a file.

Keys may be added. Numbers that are not finite are null.
"""


class Key(NamedTuple):
    """One key of a document. is_optional: whether the key may be missing."""

    name: str
    hint: Any
    meaning: str
    is_optional: bool


def keys_of(kind: type) -> list[Key]:
    """Return the keys of a dataclass or typed dictionary, with their descriptions from its docstring."""
    hints = typing.get_type_hints(kind)
    said = attributes(getdoc(kind) or "")
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(hints)
    optional = getattr(kind, "__optional_keys__", ())
    return [Key(name, hints[name], said.get(name, ""), name in optional) for name in names]


def attributes(text: str) -> dict[str, str]:
    """Return the description of each attribute in a docstring.

    The docstring has an ``Attributes:`` section, or a line such as "files: their number. path: where".
    """
    _, _, section = text.partition("Attributes:\n")
    if not section:
        return dict(re.findall(r"(?:^|\. |\n)([a-z_]+): (.+?)(?=\.(?: [a-z_]+: |\n|$))", text))
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if start := re.match(r"    ([a-z_, ]+): (.*)", line):
            name = start[1]
            found |= dict.fromkeys(name.split(", "), start[2])
        elif name and line.strip():
            for each in name.split(", "):
                found[each] += " " + line.strip()
    return {name: text.rstrip(".") for name, text in found.items()}


def is_object(hint: Any) -> bool:
    """Return whether a type becomes a JSON object."""
    return isinstance(hint, type) and (is_dataclass(hint) or typing.is_typeddict(hint))


def type_text(hint: Any) -> str:
    """Return the JSON name of a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if part is type(None) else type_text(part) for part in arguments)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)}: {', '.join(map(type_text, arguments))}"
    if origin in (list, tuple):
        return f"list of {type_text(arguments[0])}"
    if origin in (dict, Mapping):
        return f"object of {type_text(arguments[1])}"
    if is_object(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f'"{member.value}"' for member in hint)
    return PLAIN[hint]


def inside(hint: Any) -> Iterator[type]:
    """Yield all types within a type that become JSON objects."""
    if is_object(hint):
        yield hint
    elif get_origin(hint) is not Literal:
        arguments = get_args(hint)
        for part in arguments[1:] if get_origin(hint) in (dict, Mapping) else arguments:
            yield from inside(part)


def page() -> str:
    """Return the whole page as Markdown."""
    parts = [INTRODUCTION, "| command | document |\n|---|---|"]
    parts[-1] += "".join(
        f"\n| `{name}` | {type_text(kind)}{', as the last line' if name in FOLLOWS else ''} |"
        for name, kind in RESULTS.items()
    )
    done: dict[type, None] = {}
    waiting = [Failed, *RESULTS.values()]
    while waiting:
        kind = waiting.pop(0)
        if kind in done:
            continue
        done[kind] = None
        keys = keys_of(kind)
        waiting = [*(found for key in keys for found in inside(key.hint)), *waiting]
        rows = [
            f"| `{key.name}`{' (optional)' if key.is_optional else ''} | {type_text(key.hint)} | {_cell(key.meaning)} |"
            for key in keys
        ]
        parts.append(
            f"## {kind.__name__}\n\n{summary(kind)}\n\n| key | type | meaning |\n|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def summary(kind: type) -> str:
    """Return the first paragraph of a docstring, without the attributes described in it."""
    text = (getdoc(kind) or "").split("\n\n")[0]
    return " ".join(re.split(r"(?<=\.) (?=[a-z_]+(?:, [a-z_]+)*: )", text)[0].split())


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")
