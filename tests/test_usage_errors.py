"""Usage errors under ``--json``: one document, exit code 2, for each command, option and argument of the tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.commands import cli_command
from lora_rocm.commands.cli_command import BenchCommand
from lora_rocm.commands.output import Failed
from lora_rocm.json_reference import RESULTS
from tests.command_line import COMMANDS, Ended, command_line
from tests.documents import faults

NO_VALUE = "no-such-value"
"""No number and no choice has this text."""
TEXTS = (str, Path, list[str], tuple[str, str])
"""Types of options that any text fits."""
USAGE = 2


def tree(command: Any = COMMANDS, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and group, with the words that lead to it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from tree(child, *path, name)


GROUPS = [(path, each) for path, each in tree() if hasattr(each, "commands")]
LEAVES = [(path, each) for path, each in tree() if not hasattr(each, "commands")]


def wrong_lines(path: tuple[str, ...], command: Any) -> Iterator[tuple[str, ...]]:
    """Command lines with one error each: option, value, missing value, missing argument, too many arguments."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    needed = [NO_VALUE for each in arguments if each.required]
    yield (*path, *needed, "--no-such-option")
    if needed:
        yield path
    if all(each.nargs == 1 for each in arguments):
        yield (*path, *("x" for _ in arguments), "one", "more")
    for option in command.params:
        if option.param_type_name == "option" and not option.is_flag and not option.hidden:
            name = max(option.opts, key=len)
            yield (*path, *needed, name)  # the value is missing; it has to be the last word
            if option.type_descriptor.annotation not in TEXTS:
                yield (*path, *needed, name, *[NO_VALUE] * option.nargs)
        elif option.param_type_name == "option" and option.name != "as_json":
            yield (*path, *needed, f"{max(option.opts, key=len)}=x")


def is_usage_document(ended: Ended) -> bool:
    """Whether standard output is the document of a usage error, on one line, and the exit code fits."""
    try:
        found = json.loads(ended.stdout)
    except ValueError:
        return False
    is_whole = not list(faults(found, Failed)) and ended.stdout.count("\n") == 1
    return is_whole and found["error"]["code"] == "usage" and found["error"]["exit_code"] == ended.exit_code == USAGE


def test_the_tree_has_each_command() -> None:
    assert {" ".join(path) for path, _ in LEAVES} == RESULTS.keys() | {"schema"}
    assert [path for path, _ in GROUPS][0] == () and len(GROUPS) > 1


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_each_wrong_line_of_a_command_is_a_document(path: tuple[str, ...], command: Any) -> None:
    for words in wrong_lines(path, command):
        number = len(path)
        line = (*words[:number], "--json", *words[number:])
        ended, plain = command_line(*line), command_line(*words)
        assert is_usage_document(ended), (line, ended)
        assert json.loads(ended.stdout)["error"]["where"] == " ".join(path), line
        assert (plain.exit_code, plain.stdout) == (USAGE, "") and plain.stderr, words
        assert plain.stderr == ended.stderr or isinstance(command, BenchCommand), "the text is the same"


@pytest.mark.parametrize(("path", "group"), GROUPS, ids=[" ".join(path) or "lora-rocm" for path, _ in GROUPS])
def test_each_wrong_line_of_a_group_is_a_document(path: tuple[str, ...], group: Any) -> None:
    first = next(iter(group.commands))
    for words in (("no-such-command", "--json"), ("--json",), ("--json", first), ("--no-such-option", first, "--json")):
        ended = command_line(*path, *words)
        assert is_usage_document(ended), (words, ended)
        assert json.loads(ended.stdout)["error"]["where"] == " ".join(path)
    assert command_line(*path, "no-such-command").stdout == ""


def test_words_after_the_end_of_the_options_do_not_ask_for_json() -> None:
    assert command_line("check", "--no-such-option", "--", "--json").stdout == ""
    assert is_usage_document(command_line("check", "--no-such-option", "--json=x"))


def test_a_usage_error_without_its_document_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_usage_document(command_line("bogus", "--json"))  # the control
    monkeypatch.setattr(cli_command, "asks_for_json", lambda arguments: False)
    assert not is_usage_document(command_line("bogus", "--json"))
