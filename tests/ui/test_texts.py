"""The page's texts: each key has one, and each text is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import nodes

from lora_rocm.page_parts.texts import UnknownTextError, t, texts
from lora_rocm.ui.rendering import environment

PACKAGE = Path(__file__).parents[2] / "lora_rocm"
ROOMS = ("ui", "page_parts", "report")


def missing(keys: set[str], prefixes: set[str]) -> list[str]:
    """Keys without a text, and prefixes of computed keys without any."""
    unused = [prefix for prefix in prefixes if not any(key.startswith(prefix) for key in texts())]
    return [*sorted(keys - texts().keys()), *sorted(unused)]


def test_every_key_of_the_templates_has_a_text() -> None:
    keys, prefixes, loader = set[str](), set[str](), environment().loader
    assert loader is not None
    for name in environment().list_templates():
        source, _, _ = loader.get_source(environment(), name)
        for call in environment().parse(source).find_all(nodes.Call):
            if not (isinstance(call.node, nodes.Name) and call.node.name == "t" and call.args):
                continue
            first = call.args[0]
            if isinstance(first, nodes.Const):
                keys.add(str(first.value))
            elif isinstance(first, nodes.Concat) and isinstance(first.nodes[0], nodes.Const):
                prefixes.add(str(first.nodes[0].value))
    assert len(keys) > 300 and prefixes  # the templates are read
    assert missing(keys, prefixes) == []


def test_a_missing_key_is_an_error() -> None:
    assert missing({"start.title"}, {"state."}) == []
    assert missing({"start.nothing"}, {"nothing."}) == ["start.nothing", "nothing."]
    with pytest.raises(UnknownTextError):
        t("start.nothing")


def test_every_text_is_used() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for room in ROOMS
        for suffix in ("*.j2", "*.py", "*.js")
        for path in (PACKAGE / room).rglob(suffix)
    ]
    used = {key for source in sources for key in re.findall(r"""\bt\(["']([\w.]+)["']""", source)}
    prefixes = {key for source in sources for key in re.findall(r"""\bt\(f?["']([\w.]+\.)(?:["'] ~|\{)""", source)}
    assert not [key for key in texts() if key not in used and not key.startswith(tuple(prefixes))]
