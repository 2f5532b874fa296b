"""TOML, JSON and YAML of other trainers become settings with lines; damaged files are read as far as possible."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lora_rocm.importing.formats.config_text import MAX_DOTS, json_settings, toml_settings, yaml_settings
from lora_rocm.importing.formats.tree import MAX_DEPTH, MAX_SETTINGS
from lora_rocm.importing.setting import FileContent

Read = Callable[[str, str], FileContent]


def pairs(content: FileContent) -> list[tuple[str, object, int]]:
    return [(setting.key, setting.value, setting.line) for setting in content.settings]


def test_toml_with_sections_and_lists_of_sections() -> None:
    text = 'a = 1\n[b]\nc = [1, 2]\n# a = 3\n[[d]]\npath = "x"\n  [[d.e]]\n  f = true\n[[d]]\npath = "y"\n'
    assert pairs(toml_settings(text, "f")) == [
        ("a", 1, 1),
        ("b.c", [1, 2], 3),
        ("d[0].path", "x", 6),
        ("d[0].e[0].f", True, 8),
        ("d[1].path", "y", 10),
    ]


def test_damaged_toml_is_read_by_lines() -> None:
    text = 'a = 1\nb = \n[s]\npath = "C:\\models\\new.safetensors"\nc = $HOME\n'
    found = toml_settings(text, "f")
    assert pairs(found) == [("a", 1, 1), ("s.path", "C:\\models\\new.safetensors", 4)]
    assert [(part.file, part.line) for part in found.unread] == [("f", 2), ("f", 5)]


def test_json_with_nested_values() -> None:
    text = '{\n "a": {"b": null},\n "c": [{"d": 1}, {"d": 2}],\n "e": []\n}'
    assert pairs(json_settings(text, "f")) == [("a.b", None, 2), ("c[0].d", 1, 3), ("c[1].d", 2, 3), ("e", [], 4)]


def test_damaged_json_keeps_its_sections() -> None:
    text = '{\n  "a": {"b": 32,\n    "path": "a"\n  },\n  "lr": 1e-4, oops\n  "d": [{"e": 1},\n  {"e": 2, "f": "cut'
    found = json_settings(text, "f")
    assert pairs(found) == [("a.b", 32, 2), ("a.path", "a", 3), ("lr", 1e-4, 5), ("d[0].e", 1, 6), ("d[1].e", 2, 7)]
    assert [part.line for part in found.unread] == [5, 7]


WINDOWS = r"C:\Users\new\x.safetensors"


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (json_settings, f'{{\n"a": {{"path": "{WINDOWS}"}},\n"b": 2\n}}'),
        (toml_settings, f'b = 2\n[a]\npath = "{WINDOWS}"\n'),
        (yaml_settings, f'a:\n  path: "{WINDOWS}"  # here\nb: 2\n'),
    ],
)
def test_a_windows_path_with_single_backslashes_costs_nothing(read: Read, text: str) -> None:
    found = read(text, "f")
    assert {setting.key: setting.value for setting in found.settings} == {"a.path": WINDOWS, "b": 2}
    assert found.unread == []


def test_a_list_that_is_cut_off_is_not_taken() -> None:
    found = json_settings('{"a": {"b": 1, "c": [1, 2, ', "f")
    assert pairs(found) == [("a.b", 1, 1)] and [part.line for part in found.unread] == [1]


@pytest.mark.parametrize(
    "text",
    ['{"a": {"b": 1,}, "c": [2,],}', '{"a": {"b": 1}, // why\n "c": [2]}', '{"a": {"b": 1} "c": [2]}',
     '{"a": {"b": 1, "x"}, "c": [2]}',
     '{"a": {"b": 1, "x\x01": 2}, "c": [2]}', '{"a": {"b": 1]}, "c": [2]}', '{"a": {"b": 1, "x": y\n}, "c": [2]}'],
)  # fmt: skip
def test_small_faults_of_json_cost_only_their_own_line(text: str) -> None:
    found = json_settings(text, "f")
    keys = {setting.key: setting.value for setting in found.settings}
    assert keys["a.b"] == 1 and (keys.get("c") == [2] or [part.line for part in found.unread] == [1])


def test_damaged_yaml_is_read_down_to_the_damage() -> None:
    found = yaml_settings("a: 1\nb: {c: 2}\nd: [1, 2\ne: 3\n", "f")
    assert pairs(found) == [("a", 1, 1), ("b.c", 2, 2)]
    assert [part.line for part in found.unread] == [3, 4]


@pytest.mark.parametrize("read", [toml_settings, json_settings, yaml_settings])
@pytest.mark.parametrize(
    "text",
    ["", "\n", "[" * 5000, "{" * 5000, "a = " + "[" * 5000, ".".join("a" * (MAX_DOTS + 2)) + " = 1", "\x00", "a: b: c",
     "'", "- - - -", "a = 1\na = 2", '{"a": 1, "a": 2}', "&a [*a]", "\u2028", "= 3", "[]\n]"],
)  # fmt: skip
def test_no_text_is_an_error(read: Read, text: str) -> None:
    assert isinstance(read(text, "f"), FileContent)


def test_the_number_and_the_depth_of_settings_are_bounded() -> None:
    many = json.dumps({f"a{number}": number for number in range(MAX_SETTINGS + 10)})
    assert len(json_settings(many, "f").settings) == MAX_SETTINGS
    deep: object = 1
    for _ in range(MAX_DEPTH + 5):
        deep = {"a": deep}
    assert json_settings(json.dumps(deep), "f").settings == []
