"""Keyword arguments of calls in a Python script or notebook, read from its syntax tree. Nothing is executed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection
from typing import cast

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.setting import FileContent, Setting, Unread, Value, is_secret_text

MAGIC = re.compile(r"^\s*[!%]")


def call_settings(text: str, file: str, functions: Collection[str]) -> FileContent:
    """The keyword arguments of each call of ``functions`` as ``Function.keyword``; positional ones as ``Function[0]``.

    Names that the file binds to a literal once are replaced. A value that is not a literal is listed as unread.

    Args:
        text: of a script, or the JSON of a notebook.
        file: for the settings.
        functions: last parts of their names: ``SFTConfig``, ``from_pretrained``.
    """
    found = FileContent()
    code = _code_of_notebook(text)
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        found.unread.append(Unread(file, getattr(error, "lineno", 0) or 0, "is not Python here"))
        return found
    constants = _constants(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (name := _name_of(node.func)) not in functions:
            continue
        given = [(f"{name}[{index}]", each) for index, each in enumerate(node.args)]
        given += [(f"{name}.{each.arg}" if each.arg else f"{name}.**", each.value) for each in node.keywords]
        for key, value in given:
            try:
                found.settings.append(Setting(key, _literal(value, constants), file, value.lineno))
            except ValueError:
                what = _source_of(value)
                found.unread.append(Unread(file, value.lineno, f"{key} is computed ({what}), and no code is run"))
    return found


def _source_of(node: ast.expr) -> str:
    text = " ".join(ast.unparse(node).split())
    if is_secret_text(text):
        return "***"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _code_of_notebook(text: str) -> str:
    """The code of a notebook's cells, or the text itself. Lines of shell commands and magics become comments."""
    if text.lstrip().startswith("{"):
        try:
            cells = parse_json(text, repeated_keys=True).get("cells", [])
            code = [cell["source"] for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
            text = "\n".join("".join(each) if isinstance(each, list) else str(each) for each in code)
        except (BadJson, AttributeError, KeyError, TypeError):
            return text
    return "\n".join(f"# {line}" if MAGIC.match(line) else line for line in text.splitlines())


def _constants(tree: ast.Module) -> dict[str, Value]:
    """The names that are bound exactly once, to a literal."""
    found: dict[str, Value] = {}
    spoiled: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            (spoiled.add if node.id in found else lambda name: found.setdefault(name, None))(node.id)
    values: dict[str, Value] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name not in spoiled:
                try:
                    values[name] = _plain(ast.literal_eval(node.value))
                except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                    continue
    return values


def _literal(node: ast.expr, constants: dict[str, Value]) -> Value:
    """The value of an expression.

    Raises:
        ValueError: it is not a literal, nor a name bound to one.
    """
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return _plain(ast.literal_eval(node))
    except (TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError from error


def _plain(value: object) -> Value:
    """A literal as JSON has it: tuples and sets as lists.

    Raises:
        ValueError: JSON has no such value, such as bytes.
    """
    try:
        return cast(Value, parse_json(json.dumps({"value": value}, default=_listed))["value"])
    except (TypeError, BadJson) as error:
        raise ValueError from error


def _listed(value: object) -> list[object]:
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    raise TypeError


def _name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
