"""Changes of one key: only its line changes, comments stay, and any text is read back as meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_rocm.recipe.load import shipped_recipes
from lora_rocm.recipe.value_edit import remove_value, set_value
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, parse_yaml
from tests.recipe.odd_recipes import odd_recipes

SHIPPED = {name: path.read_text(encoding="utf-8") for name, path in shipped_recipes().items()}
VALUES: tuple[tuple[str, str, Any], ...] = (
    ("lora", "rank", 128),
    ("lora", "use_dora", True),
    ("model", "name_or_path", "C:\\my models\\a #1: b.safetensors"),
    ("data", "resolution", [512, 768]),
    ("data", "trigger_word", "yes"),
    ("sample", "prompts", ["a cat", "x: 'y' # z", "größe"]),
    ("data", "sources", [{"path": "a", "repeats": 2}, {"path": "b"}]),
    ("runtime", "memory", "keep"),
    ("data", "include", []),
)


def differences(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def require_change_read_back(text: str, change: tuple[str, str, Any]) -> None:
    section, key, value = change
    data = parse_yaml(text).value
    changed = set_value(text, section, key, value)
    assert parse_yaml(changed).value == {**data, section: {**data.get(section, {}), key: value}}
    taken = [line for line in differences(text, changed) if line.startswith("-")]
    old = data.get(section, {}).get(key)
    assert len(taken) <= (len(old) + 1 if isinstance(old, list) else 1)
    assert remove_value(changed, section, key) != changed


def require_removal(text: str, section: str, key: str) -> None:
    removed = remove_value(text, section, key)
    left = {each: value for each, value in parse_yaml(text).value[section].items() if each != key}
    assert parse_yaml(removed).value.get(section, {}) == left
    assert not [line for line in differences(text, removed) if line.startswith("+")]


def keys_of(text: str) -> list[tuple[str, str]]:
    return [
        (section, key) for section, keys in parse_yaml(text).value.items() if isinstance(keys, dict) for key in keys
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_change_is_read_back_and_other_lines_stay(name: str) -> None:
    """Each recipe with a third of the changes and of its keys, so that each change meets several recipes."""
    start = list(SHIPPED).index(name) % 3
    for change in VALUES[start::3]:
        require_change_read_back(SHIPPED[name], change)
    for section, key in keys_of(SHIPPED[name])[start::3]:
        require_removal(SHIPPED[name], section, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_change_is_read_back_and_other_lines_stay(name: str) -> None:
    for change in VALUES:
        require_change_read_back(SHIPPED[name], change)
    for section, key in keys_of(SHIPPED[name]):
        require_removal(SHIPPED[name], section, key)


def test_comments_stay_in_their_column() -> None:
    text = "lora:\n  rank: 16     # why\n  alpha: 8\n"
    assert set_value(text, "lora", "rank", 128) == "lora:\n  rank: 128    # why\n  alpha: 8\n"
    text = "sample:\n  prompts:\n    - one   # first\n    - two\n  seed: 1\n"
    assert set_value(text, "sample", "prompts", ["one", "three"]) == text.replace("two", "three")


def test_a_number_keeps_its_spelling() -> None:
    assert set_value("optim:\n  rate: 1\n", "optim", "rate", 0.0001, "1.0e-4") == "optim:\n  rate: 1.0e-4\n"


@given(odd_recipes(), st.sampled_from(["b", "k", "new"]), st.sampled_from([1, "x", ["x", "y"]]))
def test_any_change_is_read_back_or_refused(text: str, key: str, value: object) -> None:
    """Comments stay."""
    try:
        before = parse_yaml(text)
        changed = set_value(text, "a", key, value)
        without = remove_value(text, "a", key)
    except YamlSyntaxError:
        return
    if before.problems:
        return
    section = before.value.get("a") if before.value else None
    assert parse_yaml(changed).value == {**(before.value or {}), "a": {**(section or {}), key: value}}
    assert parse_yaml(without).value in (before.value, *_without(before.value, key))


def _without(data: dict[str, Any] | None, key: str) -> Iterator[object]:
    section = (data or {}).get("a")
    if data is None or not isinstance(section, dict) or key not in section:
        return
    left = {name: value for name, value in section.items() if name != key}
    yield {**data, "a": left} if left else {name: value for name, value in data.items() if name != "a"} or None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "a:\n  b: 1\n"),
        ("a:\n", "a:\n  b: 1\n"),
        ("a: {c: 2}\n", "a: {c: 2, b: 1}\n"),
        ("a:\n  b: # why\n  # and how\n  c: 2\n", "a:\n  b: 1  # why\n  # and how\n  c: 2\n"),
        ("a: {b: , c: 3} # d\n", "a: {b: 1, c: 3} # d\n"),
        ("a:\n  c: # why\n\n# end\n", "a:\n  c: # why\n  b: 1\n\n# end\n"),
        ("a: {b: 2, c: 3} # d\n", "a: {b: 1, c: 3} # d\n"),
        ("a:\n  c: 2", "a:\n  c: 2\n  b: 1\n"),
        ("a:\n    c: |\n      text\n\n# end\n", "a:\n    c: |\n      text\n    b: 1\n\n# end\n"),
    ],
)
def test_unusual_texts(text: str, wanted: str) -> None:
    assert set_value(text, "a", "b", 1) == wanted


def test_a_shared_value_is_changed_in_one_place() -> None:
    text = "a: {x: &q 3}\nb: {y: *q}  # c\n"
    assert parse_yaml(set_value(text, "b", "y", 4)).value == {"a": {"x": 3}, "b": {"y": 4}}
    assert parse_yaml(set_value("a: &m {x: 3}\nb: *m\n", "b", "x", 4)).value == {"a": {"x": 3}, "b": {"x": 4}}


@pytest.mark.parametrize("text", ["a: [", "- a\n", "a: 5\n", "a: &x\na: *x\n"])
def test_what_has_no_sections_is_refused(text: str) -> None:
    with pytest.raises(YamlSyntaxError):
        set_value(text, "a", "b", 1)
