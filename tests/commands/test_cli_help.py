"""The help of every command, frozen at 80 columns: nothing is cut, and each has an example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands.cli_help import GROUPS
from tests.command_line import COMMANDS, command_line
from tests.golden import GOLDEN, assert_golden

COLUMNS = 80


def commands(command: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command and group, by its name."""
    yield prefix, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{prefix} {name}".strip())


ALL = dict(commands(COMMANDS))


def help_of(name: str) -> str:
    ended = command_line(*name.split(), "--help")
    assert ended.exit_code == 0
    return re.sub(r"^Usage: \S+", "Usage: lora-rocm", ended.stdout)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("name", [*ALL])
def test_help_is_frozen_and_nothing_is_cut(name: str) -> None:
    text = help_of(name)
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "..." not in re.sub(r"(FILE|RECIPE|NAME)\.\.\.", "", text.replace("COMMAND [ARGS]...", ""))
    assert_golden("help", name.replace(" ", "-") or "lora-rocm", text)


def test_no_help_of_a_command_that_is_gone() -> None:
    assert {path.stem for path in (GOLDEN / "help").glob("*.txt")} == {
        name.replace(" ", "-") or "lora-rocm" for name in ALL
    }


@pytest.mark.parametrize("name", [*ALL])
def test_every_command_has_an_example_and_every_value_a_name(name: str) -> None:
    command = ALL[name]
    examples = command.epilog.splitlines()
    assert examples and all(line.startswith(name) for line in examples)
    assert name.count(" ") or not name or command.rich_help_panel in GROUPS
    for parameter in command.params:
        assert parameter.is_flag if parameter.param_type_name == "option" and not parameter.metavar else True
        assert parameter.metavar is None or not re.search(r"range|<|int|float", parameter.metavar)


def examples() -> Iterator[tuple[str, list[str]]]:
    for name, command in ALL.items():
        for line in command.epilog.splitlines():
            words = [word.strip("\"'") for word in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", line.partition(" > ")[0])]
            yield name, words


@pytest.mark.parametrize(("name", "words"), [*examples()])
def test_examples_are_commands_that_exist(name: str, words: list[str]) -> None:
    group = COMMANDS
    context: Any = None
    while hasattr(group, "commands"):
        context = group.make_context(words[0], words[:1], parent=context, resilient_parsing=True)
        group, words = group.commands[words[0]], words[1:]
    assert group.make_context(name, list(words), parent=context)


def test_a_group_without_a_panel_is_listed_last() -> None:
    from lora_rocm.commands.cli_help import write_commands

    class Formatter:
        def __init__(self) -> None:
            self.headings: list[str] = []

        def section(self, heading: str) -> Any:
            import contextlib

            self.headings.append(heading)
            return contextlib.nullcontext()

        def write_dl(self, rows: list[tuple[str, str]]) -> None:
            assert rows == [("x".ljust(1), "Do it.")]

    class Bare:
        name, help, rich_help_panel = "x", "Do it. Then more.\n\nAnd more.", None

    formatter = Formatter()
    write_commands([Bare()], formatter)
    assert formatter.headings == ["Commands"]


def variables() -> set[str]:
    return {
        parameter.envvar for command in ALL.values() for parameter in command.params if parameter.envvar is not None
    }


def test_every_variable_is_on_the_page_and_in_the_help() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
    found = variables()
    assert len(found) > 4 and all(name.startswith("LORA_ROCM_") and f"`{name}`" in page for name in found)
    for name, command in ALL.items():
        text = " ".join(help_of(name).split())
        assert all(parameter.envvar in text for parameter in command.params if parameter.envvar)
