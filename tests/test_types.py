"""The holes that are left in the strict types: ``Any``, and comments that silence the checker.

Each module has a ceiling in ``type_ceilings.toml``. A new hole has its reason at its line: ``# untyped: REASON``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.markers import markers
from tests.test_architecture import PACKAGE, Module, package_modules

CEILINGS = Path(__file__).with_name("type_ceilings.toml")
IGNORE = re.compile(r"#\s*type:\s*ignore")


@cache
def ceilings() -> dict[str, tuple[int, int]]:
    """Module -> the most ``Any`` and the most ``type: ignore`` comments without a reason at their line."""
    sections = tomllib.loads(CEILINGS.read_text(encoding="utf-8")).values()
    return {
        f"{PACKAGE}.{name}": (row[0], row[1]) for each in sections for name, row in each.items() if name != "reason"
    }


def holes(module: Module) -> tuple[int, int]:
    """The number of ``Any`` in the code and of ``type: ignore`` comments, without those that have their reason."""
    explained = markers(module.source, "untyped")
    lines = [node.lineno for node in module.nodes if isinstance(node, ast.Name) and node.id == "Any"]
    lines += [node.lineno for node in module.nodes if isinstance(node, ast.Attribute) and node.attr == "Any"]
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    ignored = [token.start[0] for token in tokens if token.type == tokenize.COMMENT and IGNORE.search(token.string)]
    return _without_reason(lines, explained), _without_reason(ignored, explained)


def _without_reason(lines: list[int], explained: dict[int, bool]) -> int:
    return sum(line not in explained and not explained.get(line - 1) for line in lines)


def faults(module: Module, ceiling: tuple[int, int]) -> Iterator[str]:
    """Yield what exceeds a module's ceiling. Triton kernels are not counted: they are not Python."""
    if module.name.endswith("_triton"):
        return
    for name, count, most in zip(("Any", "type: ignore"), holes(module), ceiling, strict=True):
        if count > most:
            yield f"{module.name} has {count} x {name}, at most {most}: write '# untyped: REASON' at the new one"


def test_no_module_has_more_holes_in_its_types_than_its_ceiling() -> None:
    known = ceilings()
    assert [fault for module in package_modules() for fault in faults(module, known.get(module.name, (0, 0)))] == []


def test_each_ceiling_has_its_module_and_each_section_its_reason() -> None:
    names = {module.name for module in package_modules()}
    assert [name for name in ceilings() if name not in names] == [], "remove the rows of these modules"
    sections = tomllib.loads(CEILINGS.read_text(encoding="utf-8")).values()
    assert all(len(each["reason"]) > 10 for each in sections) and len(ceilings()) > 100
    assert len(ceilings()) == sum(len(each) - 1 for each in sections), "a module has two rows"


SOURCE = "from typing import Any\nimport typing as t\nx: Any = f()  # type: ignore[no-untyped-call]\ny: t.Any = 'Any'\n"


@pytest.mark.parametrize(("ceiling", "count"), [((2, 1), 0), ((3, 2), 0), ((1, 1), 1), ((2, 0), 1), ((0, 0), 2)])
def test_a_hole_is_seen(ceiling: tuple[int, int], count: int) -> None:
    module = Module(f"{PACKAGE}.train.x", SOURCE)
    assert holes(module) == (2, 1) and len(list(faults(module, ceiling))) == count


def test_a_reason_at_the_line_permits_a_hole_there_alone() -> None:
    reason = "# untyped: the library has no annotations"
    source = f"x: Any = f()  # type: ignore[no-untyped-call]  {reason}\ny: Any = 1\n{reason}\nz: Any = 1\n"
    assert holes(Module(f"{PACKAGE}.train.x", source)) == (1, 0)
    assert holes(Module(f"{PACKAGE}.train.x", "y: Any = 1  # untyped: yes\n")) == (1, 0), "no reason"
