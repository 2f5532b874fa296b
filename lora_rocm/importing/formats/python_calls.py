"""Keyword arguments of calls in a Python script or notebook, read from its syntax tree. Nothing is executed."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value, is_secret_text

MAGIC = re.compile(r"^\s*[!%?]")
CELL_MAGIC = re.compile(r"^\s*%%(?!time|capture)")
"""The first line of a cell in another language."""
SHOWN_CODE = 40


@dataclass(frozen=True)
class Code:
    """A script or one cell of a notebook. lines: the number of each of its lines in the file, 0 if it is not known."""

    text: str
    lines: Sequence[int]

    def line(self, number: int) -> int:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else 0


def call_settings(
    text: str,
    file: str,
    functions: Collection[str],
    passed: Collection[str] = (),
    positional: Collection[str] | None = None,
    other_classes: Collection[str] = (),
) -> FileContent:
    """The keyword arguments of each call of ``functions`` as ``Function.keyword``; positional ones as ``Function[0]``.

    A call without any is ``Function`` with the value true. Names that the file binds to a literal once are replaced.
    Other values are listed as unread. Calls below ``if False`` do not count. The settings of the second and
    further calls of a function begin with ``later.``.

    Args:
        text: of a script, or the JSON of a notebook.
        file: for the settings.
        functions: last parts of their names: ``SFTConfig``, ``from_pretrained``.
        passed: keywords that pass objects: a value that is not a literal is the code itself.
        positional: functions with positional arguments that count, others take objects; None: all of them.
        other_classes: classes with methods of these names that do not count, such as AutoTokenizer.
    """
    found, trees = FileContent(), list[tuple[Code, ast.Module]]()
    for code in _codes(text):
        try:
            trees.append((code, ast.parse(code.text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = code.line(getattr(error, "lineno", 0) or 1)
            found.unread.append(UnreadText(file, line, "is not Python here"))
    constants = _constants([tree for _, tree in trees])
    seen = set[str]()
    for code, tree in trees:
        calls = [
            node
            for node in _living(tree)
            if isinstance(node, ast.Call)
            and _name_of(node.func) in functions
            and not (isinstance(node.func, ast.Attribute) and _name_of(node.func.value) in other_classes)
        ]
        for node in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
            name = _name_of(node.func)
            given = [
                (f"{name}[{index}]", each)
                for index, each in enumerate(node.args)
                if positional is None or name in positional
            ]
            given += [(f"{name}.{each.arg}" if each.arg else f"{name}.**", each.value) for each in node.keywords]
            begin = "later." if name in seen else ""
            seen.add(name)
            if not given:
                found.settings.append(Setting(f"{begin}{name}", True, file, code.line(node.lineno)))
            for key, value in given:
                _add(found, f"{begin}{key}", value, constants, (file, code.line(value.lineno)), passed)
    return found


def _add(
    found: FileContent,
    key: str,
    node: ast.expr,
    constants: Mapping[str, Value],
    place: tuple[str, int],
    passed: Collection[str],
) -> None:
    """Add one argument: its settings, if it is a literal or passes an object; else a part that is not read."""
    try:
        value = _literal(node, constants)
    except ValueError:
        code = _source_of(node)
        if key.rpartition(".")[2] in passed:
            found.settings.append(Setting(key, code, *place))
        else:
            found.unread.append(UnreadText(*place, f"{key} is computed ({code}), and no code is run"))
        return
    if isinstance(value, Mapping) and value:
        found.settings += [Setting(f"{key}.{name}", each, *place) for name, each in value.items()]
    else:
        found.settings.append(Setting(key, value, *place))


def _source_of(node: ast.expr) -> str:
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:
        return "a deeply nested expression"
    if is_secret_text(text):
        return "***"
    return text if len(text) <= SHOWN_CODE else f"{text[: SHOWN_CODE - 3]}..."


def _codes(text: str) -> list[Code]:
    """The code cells of a notebook, or the script itself. Lines of shell commands and magics become comments."""
    if text.lstrip().startswith("{"):
        try:
            cells = parse_json(text, repeated_keys=True).get("cells", [])
            sources = [cell["source"] for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
        except (BadJson, AttributeError, KeyError, TypeError):
            pass
        else:
            place = _NotebookLines(text)
            return [_cell(each, place) for each in sources]
    lines = text.splitlines()
    return [Code(_without_magic(lines), range(1, len(lines) + 1))]


def _cell(source: object, place: _NotebookLines) -> Code:
    lines = ("".join(map(str, source)) if isinstance(source, list) else str(source)).splitlines()
    numbers = [place.next_of(line) for line in lines]
    if lines and CELL_MAGIC.match(lines[0]):
        return Code("", ())
    return Code(_without_magic(lines), numbers)


class _NotebookLines:
    """Finds the lines of cells in the text of a notebook, one after another."""

    def __init__(self, text: str) -> None:
        self._lines, self._at = text.splitlines(), 0

    def next_of(self, line: str) -> int:
        """The number of the next line of the file with this line of code; 0 if there is none soon."""
        spellings = {json.dumps(line, ensure_ascii=is_plain)[1:-1] for is_plain in (True, False)}
        for number in range(self._at, min(self._at + 2000, len(self._lines))):
            if any(f'"{each}' in self._lines[number] for each in spellings):
                self._at = number + 1
                return number + 1
        return 0


def _without_magic(lines: Sequence[str]) -> str:
    """The code; ``pass`` in place of a command of the shell, which may be the only line of a block."""
    return "\n".join(f"{line[: len(line) - len(line.lstrip())]}pass" if MAGIC.match(line) else line for line in lines)


def _living(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below ``if False``."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        is_dead = isinstance(each, ast.If) and isinstance(each.test, ast.Constant) and not each.test.value
        waiting += each.orelse if is_dead and isinstance(each, ast.If) else ast.iter_child_nodes(each)


def _constants(trees: Sequence[ast.Module]) -> dict[str, Value]:
    """The names that are bound exactly once, to a literal."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    values: dict[str, Value] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, value = node.target.id, node.value
        else:
            continue
        if bound[name] == 1:
            try:
                values[name] = _plain(ast.literal_eval(value))
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                continue
    return values


def _literal(node: ast.expr, constants: Mapping[str, Value]) -> Value:
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
