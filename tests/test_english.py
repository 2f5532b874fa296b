"""Plain English in texts and names: the rules of ``english.toml``, tried on their sentences and on the whole tree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.english import (
    CEILINGS,
    RULES,
    Allowed,
    Rule,
    Text,
    allowed,
    ceilings,
    counts_by_room,
    hits_in,
    hits_of_the_tree,
    open_hits,
    permits,
    rules,
    texts_of,
)
from tests.source_nodes import every_node
from tests.test_architecture import PACKAGE, Module, package_modules

MAX_ALLOWED = 40
MAX_NAMES_WITH_SEVERAL_MEANINGS = 5
TABLES = tomllib.loads(RULES.read_text(encoding="utf-8"))


def text_for(rule: Rule, words: str) -> Text:
    return Text("docs/page.md", 1, rule.kinds[0] if rule.kinds else "docs", words)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_each_rule_finds_its_bad_sentences_and_no_good_one(rule: Rule) -> None:
    assert rule.bad and rule.good and rule.why and rule.write
    assert [words for words in rule.bad if not any(rule.spans(text_for(rule, words)))] == []
    assert [words for words in rule.good if any(rule.spans(text_for(rule, words)))] == []


BAD = "It is kept beside that of the run"


@pytest.mark.parametrize(
    "file, source, line, kind",
    [
        ("lora_rocm/a.py", f'"""First.\n\n{BAD}\n"""\n', 3, "docstring"),
        ("lora_rocm/a.py", f"x = 1\n# {BAD}\n", 2, "comment"),
        ("lora_rocm/a.py", f'x = f(\n    "{BAD}"\n)\n', 2, "message"),
        ("lora_rocm/a.py", 'x = f(\n    f"It is {kept!r} beside "\n    "that of the run"\n)\n', 2, "message"),
        ("lora_rocm/a.toml", f'\na = "{BAD}"\n', 2, "data"),
        ("lora_rocm/a.toml", f"\na = 1 # {BAD}\n", 2, "data"),
        ("recipes/a.yaml", f"a: 1\nb: 2 # {BAD}\n", 2, "data"),
        ("docs/a.md", f"# Title\n\n{BAD}\n", 3, "docs"),
        ("docs/a.md", f"| a | b |\n|---|---|\n| c | {BAD} |\n", 3, "docs"),
        ("scripts/a.bat", f"@echo off\necho {BAD}\n", 2, "message"),
        ("tests/test_a.py", f'def f():\n    """{BAD}"""\n', 2, "docstring"),
    ],
)
def test_prose_of_each_kind_of_file_is_read(file: str, source: str, line: int, kind: str) -> None:
    found = [hit for text in texts_of(file, source) for hit in hits_in(text, rules())]
    assert {hit.rule.name for hit in found} == {"beside", "that-of"}
    assert {hit.line for hit in found} == {line}
    assert {hit.text.kind for hit in found} == {kind} or kind == "data"


@pytest.mark.parametrize(
    "file, source",
    [
        ("lora_rocm/a.py", "x = re.compile(r'beside that of (it)')\n"),
        ("lora_rocm/a.py", '"""Reads ``beside that of`` a file, https://beside.that/of."""\n'),
        ("lora_rocm/a.py", 'beside = {"beside": f"{beside}", "that of": 1}\n'),
        ("docs/a.md", "```\nbeside that of\n```\nUse `beside that of`.\n"),
        ("tests/test_a.py", 'assert run("beside that of the run")  # beside\n'),
    ],
)
def test_code_is_no_prose(file: str, source: str) -> None:
    assert [hit for text in texts_of(file, source) for hit in hits_in(text, rules())] == []


def test_no_room_has_more_hits_than_its_ceiling() -> None:
    found = open_hits()
    limits = ceilings()
    over = {room: count for room, count in counts_by_room(found).items() if count > limits.get(room, 0)}
    shown = "\n".join(str(hit) for hit in found if hit.text.room in over)
    assert not over, f"{over}; ceilings {limits}. Rewrite, or see `python -m tests.english ROOM`.\n{shown[:4000]}"


def test_the_allow_list_is_short_reasoned_and_used() -> None:
    assert len(allowed()) <= MAX_ALLOWED
    assert [row for row in allowed() if not row.reason] == []
    unused = [row for row in allowed() if not any(permits(row, hit) for hit in hits_of_the_tree())]
    assert unused == [], "they permit nothing: remove them"


def test_a_row_permits_its_own_hit_only() -> None:
    (hit,) = hits_in(Text("docs/a.md", 1, "docs", "the door of the oven"), rules())
    assert permits(Allowed("door", "docs/a.md", "door of the oven", "an oven"), hit)
    assert not permits(Allowed("door", "docs/b.md", "door of the oven", "an oven"), hit)
    assert not permits(Allowed("aside", "docs/a.md", "door of the oven", "an oven"), hit)
    assert not permits(Allowed("door", "docs/a.md", "door of the shop", "an oven"), hit)


# ---------------------------------------------------------------- names


def parts_of(name: str) -> list[str]:
    """The words of a name in snake_case or CamelCase, in lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def glossary_words_in(name: str) -> Iterator[str]:
    """The words of the glossary's left column that a name has."""
    joined = "_" + "_".join(parts_of(name)) + "_"
    for row in TABLES["name"]:
        for word in row["words"]:
            whole = row.get("exact", False)
            if name == word if whole else f"_{word}_" in joined:
                yield word


@cache
def names_of(module: Module) -> frozenset[tuple[str, str]]:
    """Kind and name of each class, function, method and parameter, and of the file."""
    return frozenset(_names_of(module))


def _names_of(module: Module) -> Iterator[tuple[str, str]]:
    yield "file", module.name.rpartition(".")[2]
    for node in every_node(module.tree):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name
        elif isinstance(node, ast.arg):
            yield "parameter", node.arg


def glossary_faults(module: Module) -> Iterator[tuple[str, str, str, str]]:
    """Names with a word of the glossary, once each: module, kind, name, word."""
    kept = {(row["kind"], row["name"]) for row in TABLES.get("kept_name", [])}
    for kind, name in sorted(names_of(module)):
        if (kind, name) not in kept:
            yield from ((module.name, kind, name, word) for word in glossary_words_in(name))


def class_names_with_several_meanings(modules: tuple[Module, ...]) -> dict[str, list[str]]:
    """Class name to the modules that define one; a class of the same base in each family is one meaning."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.name)
    shared = {name for row in TABLES.get("class_in_several_modules", []) for name in row["names"]}
    return {name: where for name, where in sorted(places.items()) if len(where) > 1 and name not in shared}


def test_names_have_no_word_of_the_glossary() -> None:
    found = [fault for module in package_modules() for fault in glossary_faults(module)]
    assert len(found) <= ceilings().get("names", 0), "\n".join(" ".join(fault) for fault in found)


def test_a_class_name_has_one_meaning() -> None:
    found = class_names_with_several_meanings(package_modules())
    assert len(found) <= ceilings().get("class_names", 0), found


def test_names_that_stay_have_reasons_and_exist() -> None:
    rows = TABLES.get("class_in_several_modules", [])
    assert len(rows) <= MAX_NAMES_WITH_SEVERAL_MEANINGS and all(row["reason"] for row in rows)
    kept = TABLES.get("kept_name", [])
    assert all(row["reason"] for row in kept)
    there = {found for module in package_modules() for found in names_of(module)}
    assert [row for row in kept if (row["kind"], row["name"]) not in there] == []


@pytest.mark.parametrize(
    "name, words",
    [
        ("open_door", ["door"]),
        ("OpenDoor", ["door"]),
        ("_left_out_files", ["left_out"]),
        ("hollowCopy", ["hollow"]),
        ("LookAhead", ["look"]),
        ("Few", ["Few"]),
        ("lookup", []),
        ("Fewer", []),
        ("right_px", []),
        ("output", []),
        ("format", []),
        ("transform", []),
        ("left_px", []),
        ("essay", []),
    ],
)
def test_words_of_a_name(name: str, words: list[str]) -> None:
    assert list(glossary_words_in(name)) == words


def test_a_second_class_of_a_name_is_seen() -> None:
    one, other = (Module(f"{PACKAGE}.train.{name}", "class Work:\n    x = 1\n") for name in "ab")
    assert class_names_with_several_meanings((one,)) == {}
    assert class_names_with_several_meanings((one, other)) == {"Work": [one.name, other.name]}


def test_every_kind_of_name_is_seen() -> None:
    source = "class Door:\n    def say(self, *, form):\n        way = 1\n"
    module = Module(f"{PACKAGE}.train.hollow", source)
    assert {(kind, word) for _, kind, _, word in glossary_faults(module)} == {
        ("file", "hollow"),
        ("class", "door"),
        ("function", "say"),
        ("parameter", "form"),
    }


def test_ceilings_name_rooms_that_exist() -> None:
    rooms = {hit.text.room for hit in hits_of_the_tree()} | {"names", "class_names"}
    assert set(ceilings()) <= rooms, f"remove the others from {CEILINGS.name}"
