"""The holes that are left in the strict types, counted by room. A new one needs a reason here; a fixed one leaves."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter

from tests.test_architecture import PACKAGE, Module, package_modules

JSON = "JSON and YAML as they are read, before they are checked"
LIBRARY = "diffusers, transformers and PEFT have no annotations, or only in part"
ARROW = "tables of pyarrow and rows of datasets, which have no annotations"
SYSTEM = "functions of the operating system through ctypes and winreg, which other systems lack"
TORCH = "arguments of autograd functions, hooks and dispatch modes, which torch types as Any"
HOLES: dict[str, tuple[int, int, str]] = {
    "adapters": (74, 1, LIBRARY),
    "base_models": (37, 3, LIBRARY),
    "cache_store": (5, 0, JSON),
    "checks": (4, 0, TORCH),
    "children": (28, 2, JSON),
    "commands": (52, 2, LIBRARY),
    "dataset": (78, 3, ARROW),
    "device": (16, 5, TORCH),
    "doctor": (1, 0, JSON),
    "errors": (2, 0, JSON),
    "export": (7, 0, LIBRARY),
    "families": (267, 2, LIBRARY),
    "foundation": (11, 1, JSON),
    "hardware": (24, 0, JSON),
    "hardware.probe": (14, 1, SYSTEM),
    "importing": (3, 1, JSON),
    "json_reference": (5, 0, JSON),
    "kernels": (39, 0, TORCH),
    "encoded_cache": (21, 0, ARROW),
    "loader": (6, 2, TORCH),
    "memory": (27, 0, TORCH),
    "model_files": (29, 0, JSON),
    "optim": (3, 1, TORCH),
    "planning": (2, 0, JSON),
    "processes": (33, 0, JSON),
    "recipe": (95, 3, JSON),
    "report": (3, 0, JSON),
    "rules": (4, 0, JSON),
    "rundir": (28, 2, JSON),
    "sections": (5, 0, JSON),
    "supervisor": (6, 0, JSON),
    "telemetry": (6, 0, SYSTEM),
    "train": (26, 4, JSON),
    "ui": (6, 1, LIBRARY),
}
"""Room -> ``Any`` written out, ``type: ignore`` comments, why. Triton kernels are not counted: they are not Python."""
IGNORE = re.compile(r"#\s*type:\s*ignore")


def holes(module: Module) -> tuple[int, int]:
    """The number of ``Any`` in the code, and of ``type: ignore`` comments."""
    named = sum(isinstance(node, ast.Name) and node.id == "Any" for node in module.nodes)
    named += sum(isinstance(node, ast.Attribute) and node.attr == "Any" for node in module.nodes)
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    return named, sum(token.type == tokenize.COMMENT and bool(IGNORE.search(token.string)) for token in tokens)


def counted(modules: tuple[Module, ...]) -> dict[str, tuple[int, int]]:
    """The sums of ``holes`` by room; rooms without any are omitted."""
    named: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for module in modules:
        if not module.name.endswith("_triton"):
            any_count, ignore_count = holes(module)
            named[module.room] += any_count
            ignored[module.room] += ignore_count
    return {room: (named[room], ignored[room]) for room in sorted(named) if named[room] or ignored[room]}


def test_holes_in_the_types_are_those_of_the_list() -> None:
    wanted = {room: (named, ignored) for room, (named, ignored, _) in HOLES.items()}
    assert counted(package_modules()) == wanted


def test_a_hole_is_seen() -> None:
    source = (
        "from typing import Any\nimport typing as t\nx: Any = f()  # type: ignore[no-untyped-call]\ny: t.Any = 'Any'\n"
    )
    assert holes(Module(f"{PACKAGE}.train.x", source)) == (2, 1)
