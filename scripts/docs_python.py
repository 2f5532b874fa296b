"""The page of the public Python API, generated from ``lora_rocm.api``: signatures, members and the example."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from lora_rocm import api
from lora_rocm.api import PUBLIC_MEMBERS
from lora_rocm.json_reference import attributes, keys_of, summary
from scripts.docs_tables import table

EXAMPLE = Path(__file__).with_name("api_example.py").read_text(encoding="utf-8").partition("\n\n")[2]
"""The code of the page, which a test runs."""
INTRODUCTION = f"""\
# Python API

This page is generated from `lora_rocm/api.py`: `python -m scripts.docs_pages`.

```python
{EXAMPLE}```

The example trains the demo for 40 steps. [A notebook](../how-to/notebook.ipynb) does the same with a chart of the loss.

The names on this page are attributes of `lora_rocm`. They are typed (`py.typed`), imported on first use, and none of
them imports torch: training and everything that needs the model run in child processes. A script that starts runs
needs no `if __name__ == "__main__"`.

## Versions

These names follow [Semantic Versioning](https://semver.org/). Until 1.0, a minor version (0.3) may change them, and the
changelog lists each change; a patch version (0.2.1) changes nothing. From 1.0 on, only a major version changes or
removes a name, a parameter or a field. New names, optional parameters and fields may come with every minor version.
Names that are not on this page may change at any time, also those in other modules of `lora_rocm`.

The keys of `LoadedRecipe.recipe` are [the keys of a recipe](recipe/index.md). Events are [events of a run](events.md).
Fields that are other classes, such as `DataFacts`, are described as [JSON documents](json.md). All of
them follow the same rule. Errors are a `LoraRocmError` with [a stable code](errors.md).
"""


def page() -> str:
    """Return the page as Markdown."""
    functions = [name for name in api.__all__ if isinstance(getattr(api, name), FunctionType)]
    classes = [name for name in api.__all__ if name not in functions]
    parts = [INTRODUCTION, "## Functions\n"]
    parts += [_function(name) for name in functions]
    parts.append("## Classes\n")
    parts += [_class(name) for name in classes]
    return "\n".join(parts)


def signature_text(function: Any, *, bound: bool = False) -> str:
    """Return the parameters and the result of a function, as in its source. ``bound``: omit the first parameter."""
    found = inspect.signature(function)
    parameters = list(found.parameters.values())[1 if bound else 0 :]
    return re.sub(r"'([^']*)'(?= ?[,)=:]|$)", r"\1", str(found.replace(parameters=parameters)))


def _function(name: str) -> str:
    function = getattr(api, name)
    text, _, sections = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    arguments, _, raises = sections.partition("\n\nRaises:\n")
    rows = [(f"`{parameter}`", _plain(meaning)) for parameter, meaning in _arguments(arguments)]
    raised = " ".join(line.strip() for line in raises.splitlines())
    return "\n".join(
        [
            f"### `{name}`\n",
            f"```python\n{name}{signature_text(function)}\n```\n",
            _plain(text) + "\n",
            table(("parameter", "meaning"), rows) + "\n",
            f"Raises {_plain(raised)}\n" if raised else "",
        ]
    )


def _arguments(section: str) -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        yield found[1], " ".join(found[2].split())


def _class(name: str) -> str:
    kind = getattr(api, name)
    # A bar in code ends a cell for some readers of Markdown, so alternatives are joined by a word.
    rows = [(f"`{member}`", f"`{hint.replace(' | ', ' or ')}`", _plain(text)) for member, hint, text in members(name)]
    head = ("member", "type", "meaning")
    return "\n".join([f"### `{name}`\n", _plain(summary(kind)) + "\n", table(head, rows) + "\n"])


def members(name: str) -> list[tuple[str, str, str]]:
    """Return name, type or signature, and meaning of each public member of a class."""
    kind = getattr(api, name)
    if name not in PUBLIC_MEMBERS:
        return [(key.name, hint_text(key.hint), key.meaning) for key in keys_of(kind)]
    return [_member(kind, member) for member in PUBLIC_MEMBERS[name]]


def _member(kind: type, name: str) -> tuple[str, str, str]:
    found = inspect.getattr_static(kind, name, None)
    if isinstance(found, classmethod):
        return name, signature_text(getattr(kind, name)), _first(getattr(kind, name))
    if isinstance(found, FunctionType):
        return name, signature_text(found, bound=True), _first(found)
    if isinstance(found, property | cached_property):
        function = found.fget if isinstance(found, property) else found.func
        return name, hint_text(typing.get_type_hints(function)["return"]), _first(function)
    bases = [base for base in kind.__mro__ if base is not object]
    meaning = next((text for base in bases if (text := attributes(inspect.getdoc(base) or "").get(name))), "")
    hints = typing.get_type_hints(kind)
    return name, hint_text(hints[name]) if name in hints else OF_INSTANCES[name], meaning or OF_MEANING.get(name, "")


OF_INSTANCES = {"code": "str", "what": "str", "where": "str", "fix": "str", "run_dir": "RunDir"}
"""Types of attributes that are only set in ``__init__``."""
OF_MEANING = {
    "code": "stable name of the error",
    "what": "what happened",
    "where": "the place: a file, a line, a key, an option",
    "fix": "how to fix it",
    "exit_code": "exit code of the command line for this error",
    "run_dir": "the run directory; `run_dir.path` is its path",
}


def hint_text(hint: Any) -> str:
    """Return a type as it is written in the source, without modules."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(hint_text(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "None"
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)


def _first(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split()).rstrip(".")


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
