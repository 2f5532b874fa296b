"""Children of benchmarks and scripts also find the packages that the caller's PYTHONPATH names."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import command_times, golden_runs

ROOT = Path(__file__).parents[2]


def replacing(source: str) -> list[str]:
    """Functions of a source that give a child a PYTHONPATH without reading the caller's."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    texts = {node.name: ast.unparse(node) for node in functions}
    given = ("'PYTHONPATH': ", "['PYTHONPATH'] = ")
    return [name for name, text in texts.items() if any(each in text for each in given) and "('PYTHONPATH'" not in text]


def test_no_benchmark_replaces_the_search_path() -> None:
    sources = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("scripts/*.py")]
    assert {path.name: found for path in sources if (found := replacing(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("given", ["env = {'PYTHONPATH': a}", "os.environ['PYTHONPATH'] = a"])
def test_a_replaced_search_path_is_noticed(given: str) -> None:
    assert replacing(f"def f():\n    {given}") == ["f"]
    assert replacing(f"def f():\n    a = [b, os.environ.get('PYTHONPATH')]\n    {given}") == []


def golden(folder: Path) -> None:
    golden_runs.trained("sdxl", folder, folder, folder / "place" / "run", folder, {})


CHILDREN: dict[str, Callable[[Path], Any]] = {
    "golden_runs": golden,
    "command_times": lambda folder: command_times.processor_s(folder, ["--help"], folder),
}


@pytest.mark.parametrize("name", CHILDREN)
@pytest.mark.parametrize("own", ["", "/own/packages"])
def test_a_child_gets_the_callers_folders_last(
    name: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()

    def started(command: list[str], env: dict[str, str], **options: Any) -> SimpleNamespace:
        seen.extend(env["PYTHONPATH"].split(os.pathsep))
        return SimpleNamespace(returncode=1, stdout="", stderr=b"" if name == "command_times" else "")

    monkeypatch.setenv("PYTHONPATH", own)
    monkeypatch.setattr(subprocess, "run", started)
    with pytest.raises(SystemExit):  # the child that is not there has failed
        CHILDREN[name](tmp_path)
    assert str(tmp_path) in seen and "" not in seen and (seen[-1] == own) == bool(own)
