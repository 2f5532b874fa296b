"""Every phase and activity that the program records has words for people."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lora_rocm
from lora_rocm.page_parts.texts import phase_words, texts
from lora_rocm.train.class_images import PHASE
from tests.source_nodes import every_node

RECORDERS = ("phase", "beat")


def recorded() -> set[str]:
    """The names that calls of the program give: ``phase("load")``, ``beat("loader")``, ``PhaseEvent(phase=...)``."""
    found = {PHASE}
    for path in Path(lora_rocm.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in (*RECORDERS, "PhaseEvent")):
            continue
        for node in every_node(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [each.value for each in node.keywords if each.arg == "phase"] if name == "PhaseEvent" else []
            given += node.args[:1] if name in RECORDERS else []
            found |= {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_each_recorded_phase_has_words() -> None:
    names = recorded()
    assert {"imports", "step", "loader", "verdict", "ranks"} <= names
    assert {name for name in names if f"phase.{name}" not in texts()} == set()


@pytest.mark.parametrize("name", ["a phase of another version"])
def test_an_unknown_phase_is_shown_as_it_is(name: str) -> None:
    assert phase_words(name) == name
