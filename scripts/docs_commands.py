"""The page of all commands, generated from the parameters of their handlers."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, getdoc, signature
from typing import Any, get_args, get_origin

import typer
from typer.models import ArgumentInfo, CommandInfo, OptionInfo

from lora_rocm.cli import app
from lora_rocm.json_reference import RESULTS
from scripts.docs_tables import table

HEAD = """\
# Commands

Every command with its options. The same text is printed by `lora-rocm COMMAND --help` (or `-h`). `lora-rocm --version`
(or `-V`) prints the version, and `lora-rocm --install-completion` sets up completion in your shell.

Every command takes `--json` ([documents](json.md)), `--quiet` and `--verbose`. [Exit codes](exit-codes.md) are the same
for all.
This page is generated from the command line: `python -m scripts.docs_pages`.
"""
TYPES = {int: "N", float: "X"}


@dataclass(frozen=True)
class Option:
    """An option or an argument of a command. is_argument: it has no dashes."""

    names: tuple[str, ...]
    value: str
    default: str
    meaning: str
    is_argument: bool
    is_required: bool


@dataclass(frozen=True)
class Command:
    """A command. about: its help, options: in the order of its handler, examples: without the program's name."""

    about: str
    options: tuple[Option, ...]
    examples: tuple[str, ...]


def commands() -> dict[str, Command]:
    """Every command by its name; in a group the name has both words ("cache stats")."""
    return dict(_walk(app, ""))


def _walk(group: typer.Typer, name: str) -> Iterator[tuple[str, Command]]:
    for found in group.registered_commands:
        assert found.callback is not None
        own = found.name or found.callback.__name__.replace("_", "-")
        hints = typing.get_type_hints(found.callback, include_extras=True)
        parameters = signature(found.callback).parameters.values()
        options = tuple(_option(each, hints.get(each.name, each.annotation)) for each in parameters)
        yield f"{name} {own}".strip(), Command(getdoc(found.callback) or "", options, _examples(found))
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _walk(inner.typer_instance, f"{name} {inner.name}".strip())


def _examples(found: CommandInfo) -> tuple[str, ...]:
    return tuple((found.epilog or "").splitlines())


def _option(parameter: Parameter, hint: Any) -> Option:
    kind, info = get_args(hint)[:2]
    assert isinstance(info, OptionInfo | ArgumentInfo)
    plain = [part for part in get_args(kind) or (kind,) if part is not types.NoneType]
    plain = [each for part in plain for each in (get_args(part) if get_origin(part) is list else (part,))]
    (of,) = plain
    is_argument = isinstance(info, ArgumentInfo)
    given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    names = tuple(given or (f"--{parameter.name.replace('_', '-')}",))
    value = info.metavar or (
        ", ".join(str(each.value) for each in of) if issubclass(of, Enum) else TYPES.get(of, "TEXT")
    )
    is_required = parameter.default is Parameter.empty
    shown = "required" if is_required else _shown(parameter.default)
    if is_argument:
        names, value = (str(info.metavar),), ""
    elif of is bool:
        shown, value = "", ""
    variable = f" Variable: `{info.envvar}`." if info.envvar else ""
    return Option(
        tuple(sorted(names, key=len, reverse=True)),
        value,
        shown,
        f"{info.help or ''}{variable}",
        is_argument,
        is_required,
    )


def _shown(default: object) -> str:
    if default in (None, "", ()):
        return ""
    return f"`{default.value if isinstance(default, Enum) else default}`"


def page() -> str:
    """The page."""
    found = commands()
    rows = ((f"[`{name}`](#{name.replace(' ', '-')})", _first(command)) for name, command in found.items())
    first = table(("command", "what it does"), rows)
    return "\n".join([HEAD, first, *(_section(name, command) for name, command in found.items()), ""])


def _first(command: Command) -> str:
    return " ".join(command.about.split("\n\n")[0].split())


def _section(name: str, command: Command) -> str:
    arguments = [
        option.names[0] if option.is_required else f"[{option.names[0]}]"
        for option in command.options
        if option.is_argument
    ]
    rows = (
        (
            ", ".join(f"`{each}`" for each in option.names)
            + (f" `{option.value.replace('|', ' or ')}`" if option.value else ""),
            option.default,
            option.meaning,
        )
        for option in command.options
    )
    lines = [
        f"\n## {name}\n",
        command.about + "\n",
        f"```\n{' '.join(['lora-rocm', name, '[OPTIONS]', *arguments])}\n```\n",
        table(("option", "default", "meaning"), rows),
        "\n```\n" + "\n".join(f"lora-rocm {example}" for example in command.examples) + "\n```",
    ]
    if name in RESULTS:
        lines.append(f"\nWith `--json`: [{RESULTS[name].__name__}](json.md#{RESULTS[name].__name__.lower()}).")
    return "\n".join(lines)
