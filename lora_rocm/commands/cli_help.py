"""Formats help texts: groups of commands, complete sentences, types of values, defaults, variables and examples."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

TRAIN, RUNS, FILES, MACHINE = "Train", "Runs and results", "Files", "Machine"
GROUPS = (TRAIN, RUNS, FILES, MACHINE)
"""Groups of commands, in the order of the help."""
PROGRAM = "lora-rocm"
COMMON = ("as_json", "quiet", "verbose", "help")
"""Options that every command has. The help shows them last."""
OPTIONS_OF_ALL = "Options of every command"


def option_row(option: Any) -> tuple[str, str]:
    """Return names and meaning of an option."""
    names = ", ".join(sorted(option.opts, key=len))
    if not option.is_flag:
        names += f" {option.metavar}"
    return names, _meaning(option)


def argument_row(argument: Any) -> tuple[str, str]:
    """Return name and meaning of an argument."""
    return str(argument.metavar), _meaning(argument)


def _meaning(parameter: Any) -> str:
    """Return the help of a parameter, with its default and its environment variable in brackets."""
    notes = []
    default = parameter.default
    if default not in (None, False, "", ()) and not callable(default):
        notes.append(f"default: {default.value if isinstance(default, Enum) else default}")
    if parameter.envvar:
        notes.append(f"env: {parameter.envvar}")
    if parameter.required:
        notes.append("required")
    text = " ".join(str(parameter.help or "").split())
    return f"{text} [{'; '.join(notes)}]".strip() if notes else text


def write_parameters(parameters: Iterable[Any], formatter: Any) -> None:
    """Write arguments, options, and last the options of every command."""
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], OPTIONS_OF_ALL: []}
    given = list(parameters)
    has_common = any(each.name == COMMON[0] for each in given)  # a group has only --help
    for each in given:
        if each.param_type_name == "argument":
            rows["Arguments"].append(argument_row(each))
        else:
            rows[OPTIONS_OF_ALL if has_common and each.name in COMMON else "Options"].append(option_row(each))
    for heading, found in rows.items():
        if found:
            with formatter.section(heading):
                formatter.write_dl(found, col_max=26)


def write_examples(examples: str, formatter: Any) -> None:
    """Write the examples of a command. ``examples`` has one per line, without the program's name."""
    lines = examples.splitlines()
    if lines:
        with formatter.section("Examples" if len(lines) > 1 else "Example"):
            for line in lines:
                formatter.write(f"{'':>{formatter.current_indent}}{PROGRAM} {line}\n")


def write_commands(commands: Iterable[Any], formatter: Any) -> None:
    """Write the commands, grouped by their panel, each with the first sentence of its help."""
    groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in GROUPS}
    for command in commands:
        heading = command.rich_help_panel if isinstance(command.rich_help_panel, str) else "Commands"
        groups.setdefault(heading, []).append((command.name, _summary(command)))
    width = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
    for heading, rows in groups.items():
        if not rows:
            continue
        with formatter.section(heading):
            formatter.write_dl([(name.ljust(width), summary) for name, summary in rows])


def _summary(command: Any) -> str:
    paragraph = " ".join(str(command.help or "").split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "."
