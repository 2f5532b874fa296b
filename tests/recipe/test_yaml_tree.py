"""YAML text to plain values with lines."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.recipe.yaml_tree import YamlSyntaxError, dotted, is_clean, parse_yaml
from tests.recipe.odd_recipes import odd_recipes
from tests.wording import Worded, says, worded


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1", 1),
        ("a: '1'", "1"),
        ("a: 1e-4", 1e-4),
        ("a: 1_000", 1000),
        ("a: 0x10", 16),
        ("a: 0o17", 15),
        ("a: -3", -3),
        ("a: 010", 10),
        ("a:", None),
        ("a: ~", None),
        ("a: true", True),
        ("a: yes", "yes"),
        ("a: no", "no"),
        ("a: 2001-01-01", "2001-01-01"),
        ("a: [1, b]", [1, "b"]),
        ("a: &x [1]", [1]),
        ("\ufeffa: 1", 1),
        ("a: >-\n  one\n\n  two\n", "one\ntwo"),
        ("a: >\n  one\n   two\n\n\n  three\n# end\n", "one\n two\n\n\nthree\n"),
        ("a: |\n  one\n\n  # two\n", "one\n\n# two\n"),
        ("a: # why\n  one\n  two\n\n\n# end\n", "one two"),
        ("a: # why\n  # and how\n  - one # first\n\n\n", ["one"]),
        ("a: # why\n# end\n", None),
    ],
)
def test_values(text: str, value: Any) -> None:
    tree = parse_yaml(text)
    assert tree.problems == []
    assert tree.value == {"a": value} and type(tree.value["a"]) is type(value)


def test_lines_of_keys_and_items() -> None:
    tree = parse_yaml("lora:\n  rank: 3\n\ndata:\n  sources:\n    - path: a\n    - path: b\n")
    assert tree.lines[("lora",)] == 1
    assert tree.lines[("lora", "rank")] == 2
    assert tree.lines[("data", "sources", 1)] == 7
    assert tree.lines[("data", "sources", 1, "path")] == 7


@pytest.mark.parametrize(
    "text", ["a:\n  b: # why\n  # and how\n  c: 1\n", "a:\n  b:\n\n\n  c: 1\n", "a: {b: ,\n c: 1}\n"]
)
def test_a_missing_value_is_at_its_key(text: str) -> None:
    span, line = parse_yaml(text).spans[("a", "b")], parse_yaml(text).lines[("a", "b")]
    assert span.line == line and text.splitlines()[line - 1][: span.column].endswith("b") and span.width == 0


def test_aliases_are_followed() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x").value == {"a": {"b": 1}, "c": {"b": 1}}
    assert parse_yaml("a: &x 1\nb: &x 2\nc: *x").value == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3", 3, worded("recipe/given-twice-first-on-line-1")),
        ("a: !!python/object:os.system x", 1, worded("recipe/not-a-usable-value")),
        ("a: !foo x", 1, worded("recipe/not-a-usable-value")),
        ("a: !!int x", 1, worded("recipe/not-a-usable-value")),
        ("a: .nan", 1, worded("recipe/finite")),
        ("a: .inf", 1, worded("recipe/finite")),
        ("a: 1e999", 1, worded("recipe/finite")),
        ("a: 1\nb: " + "9" * 5000, 2, worded("recipe/not-a-usable-value")),
        ("? [1]\n: 2", 1, worded("recipe/plain-text")),
        ("b: &x {a: 1}\nc:\n  <<: *x", 3, worded("recipe/merge-keys")),
        ('a: "\\0"', 1, worded("recipe/characters")),
        ('a: "\\ud800"', 1, worded("recipe/characters")),
    ],
)
def test_problems(text: str, line: int, words: Worded) -> None:
    problems = parse_yaml(text).problems
    assert len(problems) == 1
    assert problems[0][1] == line and says(problems[0][2], words)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: 1\n\tb: 2", 2, 1, "tab"),
        ("a:\n  - 'x\n", 3, 1, "quoted"),
        ("a: 1\nb: [1, 2", 2, 9, "flow sequence"),
        ("a: *b", 1, 4, "alias"),
        ("a: 1\n---\nb: 2", 2, 1, "single document"),
        ("[" * 1200, 1, 1, "deeply"),
        ('a: 1\nb: "\x07"', 2, 5, "special characters"),
        ("a: &x [*x]", 1, 4, "deeply"),
        ('"\\U00110000"', 1, 1, "range"),
    ],
)
def test_syntax_errors_have_a_place(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(YamlSyntaxError, match=words) as caught:
        parse_yaml(text)
    assert (caught.value.line, caught.value.column) == (line, column)


def test_alias_bomb_is_refused_quickly() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(YamlSyntaxError, match="too large"):
        parse_yaml("\n".join(lines))


def test_dotted() -> None:
    assert dotted(("data", "sources", 0, "path")) == "data.sources[0].path"
    assert dotted(()) == ""


@given(st.text(max_size=200))
def test_any_text_reads_or_is_a_syntax_error(text: str) -> None:
    try:
        tree = parse_yaml(text)
    except YamlSyntaxError as error:
        assert error.line >= 1 and error.column >= 1 and str(error)
    else:
        assert _is_plain(tree.value)


@given(odd_recipes())
def test_no_character_appears_that_nobody_wrote(text: str) -> None:
    try:
        value = parse_yaml(text).value
    except YamlSyntaxError:
        return
    assert {*"".join(_texts(value))} <= {*text, " ", "\n"}


def _texts(value: Any) -> Iterator[str]:
    items = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from _texts(item)
    if isinstance(value, str):
        yield value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_clean(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)
