"""Reads keyword arguments of calls from the syntax tree of a Python script or notebook. Nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from lora_rocm.foundation.json_text import BadJson, parse_json
from lora_rocm.importing.formats.shell_secrets import shell_secrets
from lora_rocm.importing.setting import FileContent, Setting, UnreadText, Value, is_secret_text, names_secret

MAGIC = re.compile(r"^\s*[!%?]")
CELL_MAGIC = re.compile(r"^\s*%%(?!time|capture)")
"""Matches the first line of a notebook cell in another language."""
PYTHON_NAME = re.compile(r"(?<!\$)\{(\w+)\}")
SHOWN_CODE = 40


@dataclass(frozen=True)
class Code:
    """A script, or one cell of a notebook.

    lines: line number in the file for each line of the code; 0 if unknown. shell: its magics and shell commands.
    """

    text: str
    lines: Sequence[int]
    shell: str = ""

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
    """Return the arguments of each call of ``functions``.

    Keyword arguments have keys such as ``Function.keyword``, positional ones such as ``Function[0]``. A call
    without arguments gives ``Function`` with the value true. A name is replaced by its value if the file assigns it
    only once, and to a literal. Other values are listed as unread. Calls below ``if False`` are ignored. If a
    function is called again, the keys of these calls begin with ``later.``.

    Args:
        text: text of a script, or the JSON of a notebook.
        file: name of the file, stored in the settings.
        functions: last parts of the functions' names, such as ``SFTConfig`` or ``from_pretrained``.
        passed: keywords for objects. If such a value is not a literal, its code is used as the value.
        positional: functions with positional arguments to read, because in other functions these are objects. None
        means
            all functions.
        other_classes: classes, such as AutoTokenizer, with methods of the same names that are ignored.
    """
    found, trees = FileContent(), list[tuple[Code, ast.Module]]()
    codes = _codes(text)
    for code in codes:
        try:
            trees.append((code, ast.parse(code.text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = code.line(getattr(error, "lineno", 0) or 1)
            found.unread.append(UnreadText(file, line, "is not valid Python"))
    constants = _constants([tree for _, tree in trees])
    found.secrets += _shell_secrets_in(codes, constants, file)
    found.secrets += _secrets_in([tree for _, tree in trees], constants)
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
    """Add an argument's settings if it is a literal or an object to pass; otherwise, record it as unread."""
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
    """Return the code cells of a notebook, or the script itself. Shell commands and magics are turned into comments."""
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
    return [Code(_without_magic(lines), range(1, len(lines) + 1), _shell_of(lines))]


def _cell(source: object, place: _NotebookLines) -> Code:
    lines = ("".join(map(str, source)) if isinstance(source, list) else str(source)).splitlines()
    numbers = [place.next_of(line) for line in lines]
    if lines and CELL_MAGIC.match(lines[0]):
        return Code("", (), "\n".join(lines[1:]))
    return Code(_without_magic(lines), numbers, _shell_of(lines))


class _NotebookLines:
    """Finds the line numbers of a notebook's code lines in the notebook's text, one after another."""

    def __init__(self, text: str) -> None:
        self._lines, self._at = text.splitlines(), 0

    def next_of(self, line: str) -> int:
        """Return the number of the next line of the file with this line of code; 0 if it is not found nearby."""
        spellings = {json.dumps(line, ensure_ascii=is_plain)[1:-1] for is_plain in (True, False)}
        for number in range(self._at, min(self._at + 2000, len(self._lines))):
            if any(f'"{each}' in self._lines[number] for each in spellings):
                self._at = number + 1
                return number + 1
        return 0


def _shell_of(lines: Sequence[str]) -> str:
    """Return the magics and shell commands. A Python name in braces becomes a variable of the shell."""
    return "\n".join(PYTHON_NAME.sub(r"$\1", line.lstrip(" \t!%?")) for line in lines if MAGIC.match(line))


def _without_magic(lines: Sequence[str]) -> str:
    """Return the code without magics and shell commands.

    A shell command is replaced by ``pass``, because it may be the only line of a block.
    """
    return "\n".join(f"{line[: len(line) - len(line.lstrip())]}pass" if MAGIC.match(line) else line for line in lines)


def _living(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those below ``if False``."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        is_dead = isinstance(each, ast.If) and isinstance(each.test, ast.Constant) and not each.test.value
        waiting += each.orelse if is_dead and isinstance(each, ast.If) else ast.iter_child_nodes(each)


def _constants(trees: Sequence[ast.Module]) -> dict[str, Value]:
    """Return the values of all names that are assigned exactly once, and to a literal."""
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


def _shell_secrets_in(codes: Sequence[Code], constants: Mapping[str, Value], file: str) -> list[Value]:
    """Return the secrets of all magics and shell commands. Constants of Python are their variables."""
    commands = [code.shell for code in codes if code.shell]
    texts = [f"{name}={shlex.quote(value)}" for name, value in constants.items() if isinstance(value, str)]
    return [*sorted(shell_secrets("\n".join([*texts, *commands]), "sh", file))] if commands else []


def _secrets_in(trees: Sequence[ast.Module], constants: Mapping[str, Value]) -> Iterator[Value]:
    """Yield the values of all names, keywords and keys with secret names, and the arguments of logins."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        pairs: list[tuple[str, ast.expr | None]] = []
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(_key_of(target), value) for target in targets]
            case ast.AnnAssign(target=target, value=given):
                pairs = [(_key_of(target), given)]
            case ast.keyword(arg=str(name), value=value):
                pairs = [(name, value)]
            case ast.Dict(keys=keys, values=values):
                pairs = [(_key_of(key), value) for key, value in zip(keys, values, strict=True)]
            case ast.Call(func=function, args=arguments) if _name_of(function) == "login":
                pairs = [("token", argument) for argument in arguments]
        for name, each in pairs:
            if each is not None and names_secret(name):
                with suppress(ValueError):
                    yield _literal(each, constants)


def _key_of(node: ast.expr | None) -> str:
    """Return the name or the constant key that a value is given to; empty if there is none."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
            return name
        case ast.Subscript(slice=place):
            return _key_of(place)
    return ""


def _literal(node: ast.expr, constants: Mapping[str, Value]) -> Value:
    """Return the value of an expression.

    Raises:
        ValueError: the expression is neither a literal nor a name with a literal value.
    """
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return _plain(ast.literal_eval(node))
    except (TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError from error


def _plain(value: object) -> Value:
    """Convert a literal to a JSON value. Tuples and sets become lists.

    Raises:
        ValueError: JSON does not support the value, for example bytes.
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
