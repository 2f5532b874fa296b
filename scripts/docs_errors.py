"""The page of error codes, generated from the calls in the source that make an error.

The text of a call is a template: "…" replaces the parts that only a run knows. ``docs_errors.toml`` explains the
codes that need more than their template, and lists the codes that the source composes of a part and an ending.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lora_rocm import errors

ROOT = Path(errors.__file__).parent
UNKNOWN = "…"
CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
PLAIN_FAILURE = "Failure"
"""The class of an error that a command writes without raising it. Its exit code is a wrong command's."""
CLASSES: Mapping[str, int] = {
    PLAIN_FAILURE: errors.UserError.exit_code,
    **{
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.LoraRocmError)
    },
}
MOST_TEXTS = 4
"""Different sentences of one code that the page has."""


@dataclass
class Code:
    """One code: exit codes, what happened, and what to do about it, each in the words of the places that make it."""

    exit_codes: set[int] = field(default_factory=set)
    what: dict[str, None] = field(default_factory=dict)
    fix: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Explained:
    """``docs_errors.toml``.

    Attributes:
        meaning: code -> (what happened, what to do), where the source is not enough.
        put_together: code as the source writes it, with "…" for a part -> the codes that result.
    """

    meaning: Mapping[str, Sequence[str]]
    put_together: Mapping[str, Sequence[str]]


@cache
def explained() -> Explained:
    """The table."""
    return Explained(**tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Function:
    """A function of the package with its parameters, without ``self``."""

    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def parameters(self) -> list[str]:
        arguments = self.node.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return names[1:] if names[:1] in (["self"], ["cls"]) else names

    def argument(self, call: ast.Call, name: str) -> ast.expr | None:
        """The argument of a call for a parameter."""
        given = dict(zip(self.parameters, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        return given.get(name)

    def assigned(self, name: str, before: int) -> list[ast.expr]:
        """The values of a local name at a line: of the last assignment, and of the other branch of its ``if``."""
        found = [(node.lineno, value) for node in ast.walk(self.node) for value in _values(node, name)]
        earlier = [(line, value) for line, value in found if line <= before]
        if not earlier:
            return []
        last = max(line for line, _ in earlier)
        branches = [
            range(node.body[0].lineno, last + 1)
            for node in ast.walk(self.node)
            if isinstance(node, ast.If) and node.orelse and node.orelse[0].lineno <= last <= (node.end_lineno or last)
        ]
        inside = [branch for branch in branches if before not in branch]
        return [value for line, value in earlier if line == last or any(line in branch for branch in inside)]


def _values(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """The values that an assignment gives a name."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        assert isinstance(node, ast.Assign)
        if isinstance(target, ast.Name) and target.id == name:
            yield node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=False)
            yield from (value for each, value in pairs if isinstance(each, ast.Name) and each.id == name)


@dataclass(frozen=True)
class Place:
    """A call in the source, with the number of its module, and the function that it is in."""

    module: int
    call: ast.Call
    function: Function | None


def _add_places(places: list[Place], tree: ast.AST, module: int, function: Function | None = None) -> None:
    for node in ast.iter_child_nodes(tree):
        inside = Function(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call):
            places.append(Place(module, node, function))
        _add_places(places, node, module, inside)


def _called(call: ast.Call) -> str:
    name = call.func
    return name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""


class Source:
    """All calls and constants of some modules."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.places: list[Place] = []
        self.constants: dict[str, ast.expr] = {}
        for module, text in enumerate(texts):
            tree = ast.parse(text)
            _add_places(self.places, tree, module)
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        if isinstance(target, ast.Name):
                            self.constants[target.id] = node.value
        self.calls: dict[str, list[Place]] = {}
        for place in self.places:
            self.calls.setdefault(_called(place.call), []).append(place)

    def calls_of(self, name: str, module: int) -> list[Place]:
        """The calls of a function of a module. A private function is called in its own module only."""
        return [place for place in self.calls.get(name, ()) if place.module == module or not name.startswith("_")]

    def codes(self) -> dict[str, Code]:
        """Every code that a call makes, also by a function that is given the code."""
        found: dict[str, Code] = {}
        for place in self.places:
            name = _called(place.call)
            if (
                name == "__init__"
                and isinstance(place.call.func, ast.Attribute)
                and "super()" in ast.unparse(place.call)
            ):
                name = "RecipeError"  # the one class that sets its code itself
            if name not in CLASSES:
                continue
            code = place.call.args[0] if place.call.args else None
            what = place.call.args[1] if len(place.call.args) > 1 else None
            fix = next((each.value for each in place.call.keywords if each.arg == "fix"), None)
            makers = _is_parameter(code, place.function)
            if makers is None:
                self._add(found, CLASSES[name], code, what, fix, place)
                continue
            for use in self.calls_of(makers.node.name, place.module):  # of the function that makes the error
                given = [
                    makers.argument(use.call, each.id)
                    if isinstance(each, ast.Name) and each.id in makers.parameters
                    else each
                    for each in (code, what, fix)
                ]
                self._add(found, CLASSES[name], *given, use)
        return found

    def _add(
        self,
        found: dict[str, Code],
        exit_code: int,
        code: ast.expr | None,
        what: ast.expr | None,
        fix: ast.expr | None,
        place: Place,
    ) -> None:
        for name in self.texts(code, place):
            names = explained().put_together.get(name, [name])
            for each in names:
                if CODE.fullmatch(each):
                    entry = found.setdefault(each, Code())
                    entry.exit_codes.add(exit_code)
                    entry.what |= dict.fromkeys(self.texts(what, place))
                    entry.fix |= dict.fromkeys(self.texts(fix, place))

    def texts(self, node: ast.expr | None, place: Place, depth: int = 0) -> list[str]:
        """The possible values of an expression as texts, with "…" for parts that only a run knows."""
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.JoinedStr):
            parts = [self._part(each, place, depth) for each in node.values]
            return ["".join(parts)]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, place, depth), *self.texts(node.orelse, place, depth)]
        if isinstance(node, ast.BoolOp):
            return [text for each in node.values for text in self.texts(each, place, depth)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return [
                left + right
                for left in self.texts(node.left, place, depth)
                for right in self.texts(node.right, place, depth)
            ]
        if isinstance(node, ast.Name) and depth < 4:
            local = place.function.assigned(node.id, place.call.lineno) if place.function else []
            values = local or [value for name, value in self.constants.items() if name == node.id]
            if values:
                return [text for value in values for text in self.texts(value, place, depth + 1)]
        return [UNKNOWN]

    def _part(self, node: ast.expr, place: Place, depth: int) -> str:
        if isinstance(node, ast.FormattedValue):
            value = node.value
            if isinstance(value, ast.Name) and value.id in self.constants and depth < 4:
                return self.texts(value, place, depth + 1)[0]
            return UNKNOWN
        return self.texts(node, place, depth)[0]


def _is_parameter(code: ast.expr | None, function: Function | None) -> Function | None:
    """The function that is given the code, if it is."""
    if function is None or not isinstance(code, ast.Name) or code.id not in function.parameters:
        return None
    return function


@cache
def codes() -> Mapping[str, Code]:
    """Every error code of the package."""
    return Source([path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))]).codes()


HEAD = """\
---
hide:
  - toc
---

# Error codes

Every error has a code. With `--json` it is `error.code`; in `events.jsonl` it is the `code` of an `error` or `failure`
event. Search this page for it. The text of the error itself names the file, the key and the value.

This page is generated from the sources: `python -m scripts.docs_pages`. "…" is a part that only a run knows.
See also [exit codes](exit-codes.md).
"""


def page() -> str:
    """The page."""
    parts = [HEAD]
    for name, code in sorted(codes().items()):
        what, fix = (
            own or _sentences(found)
            for own, found in zip(explained().meaning.get(name, ("", "")), (code.what, code.fix), strict=True)
        )
        numbers = " or ".join(map(str, sorted(code.exit_codes)))
        do = f"\n**What to do:** {_safe(fix)}\n" if fix else ""
        parts.append(f"## {name}\n\nExit code {numbers}. {_safe(what)}\n{do}")
    return "\n".join(parts)


def _sentences(texts: Mapping[str, None]) -> str:
    """The different texts, joined, without empty ones."""
    whole: dict[str, None] = {}
    for text in texts:
        text = re.sub(rf"({UNKNOWN}[\s,;:]*)+{UNKNOWN}", UNKNOWN, " ".join(text.split())).strip()
        if len(re.findall(r"[a-z]{2,}", text)) >= 3:
            whole[text if text[-1:] in ".:?!" else f"{text}."] = None
    return " / ".join(list(whole)[:MOST_TEXTS])


def _safe(text: str) -> str:
    """Markdown's marks are text here."""
    return re.sub(r"([*_<|\[\]`])", r"\\\1", text)


def unexplained() -> list[str]:
    """Codes without an explanation."""
    own = explained().meaning
    return [name for name, code in sorted(codes().items()) if not (own.get(name, ("",))[0] or _sentences(code.what))]
