"""A sandbox that renders chat templates within limits of time and memory.

A template comes with a model, so its author is not trusted. The sandbox is based on transformers' and renders the same
text. In addition, operations that create values or repeat something are charged to a budget before they run: loops,
calls, filters, operators, lists, slices, output. The budget depends only on the row, so ``check`` and a run accept the
same rows on every machine and system. A time limit stops operations that take longer than their size suggests.

Not limited: a single comparison or search of two values that are within the limits.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import partial, wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

UNITS, UNITS_PER_LETTER, UNITS_PER_CALL = 2_000_000, 50, 20
"""The fixed part of a rendering's budget in units (a character, a number, or a loop iteration), the units added per
character of the row, and the cost of a call in addition to its values.
"""
MAX_RENDER_S = 20.0
CHECK_TIME_EVERY = 64


class OverLimit(Exception):
    """A rendering has exceeded its budget or its time limit."""


class Meter:
    """The remaining budget of one rendering.

    Args:
        num_letters: number of characters in the row.
        num_messages: number of messages in the row. The budget grows with it, because some templates build a
            conversation character by character.
    """

    def __init__(self, num_letters: int, num_messages: int) -> None:
        self._left = UNITS + num_letters * (UNITS_PER_LETTER + num_messages)
        self._until_s = time.monotonic() + MAX_RENDER_S
        self._num_spent = 0
        self._weights: dict[int, tuple[object, int]] = {}  # with the object, so that its id is not reused

    def spend(self, units: int) -> None:
        """Subtract the cost of an operation or of its result from the budget.

        Raises:
            OverLimit: the cost exceeds the remaining budget, or the time limit has passed.
        """
        self._left -= units
        if self._left < 0:
            raise OverLimit("rendering takes too much time or memory for this row")
        self._num_spent += 1
        if not self._num_spent % CHECK_TIME_EVERY and time.monotonic() > self._until_s:
            raise OverLimit(f"rendering takes more than {MAX_RENDER_S:.0f} s for this row")

    def weight(self, value: Any) -> int:
        """Return the size of a value in units, as if it were written out.

        An item that a list contains twice counts twice.
        """
        kind = type(value)
        if kind is str:
            return len(value) + 1
        if kind in (list, tuple, dict):
            known = self._weights.get(id(value))
            if known is None:
                parts = (*value.keys(), *value.values()) if kind is dict else value
                self.spend(len(parts))
                known = self._weights[id(value)] = value, 1 + sum(map(self._inner, parts))
            return known[1]
        if isinstance(value, int):
            return 1 + (value.bit_length() >> 3)
        if isinstance(value, str | bytes):
            return len(value) + 1
        if isinstance(value, Namespace):  # it may change, so its weight is not remembered
            return 1 + sum(map(self._inner, getattr(value, "_Namespace__attrs").values()))  # noqa: B009
        if isinstance(value, ItemsView):
            return 1 + sum(self._inner(each) for pair in value for each in pair)
        if isinstance(value, KeysView | ValuesView):
            return 1 + sum(map(self._inner, value))
        if isinstance(value, range):
            return 1 + len(value)
        return 1

    def _inner(self, value: Any) -> int:
        """Return the weight of a value inside another value. Raises OverLimit for a namespace."""
        if isinstance(value, Namespace):
            raise OverLimit("the template stores a namespace inside another value")
        return self.weight(value)


_running = threading.local()


def _meter() -> Meter:
    found: Meter = _running.meter
    return found


class metered:  # noqa: N801
    """A context in which templates are compiled and rendered. Their costs are charged to ``meter``."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        _running.meter = self._meter

    def __exit__(self, *error: object) -> None:
        del _running.meter


def sandbox() -> BoundedSandbox:
    """Return a sandbox with the filters, globals and tags of transformers."""
    theirs: Any = _compile_jinja_template("").environment
    extensions = [type(each) for each in theirs.extensions.values()]
    found = BoundedSandbox(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=extensions,
        optimized=False,  # no part of a template runs at compile time
        finalize=_written_out,
    )
    found.globals.update(theirs.globals)
    found.globals["lipsum"] = _paying(theirs.globals["lipsum"], lambda n=5, html=True, min=20, max=100: n * max * 10)
    found.filters.update({name: _paying(each, GROWTH.get(name)) for name, each in theirs.filters.items()})
    found.filters.update({"tojson": _paying(_as_json(theirs.filters["tojson"]), None), **OWN_FILTERS})
    return found


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A Jinja sandbox that charges a template's operations to the current meter."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Paying().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right_operand: Any) -> Any:
        meter = _meter()
        if operator == "+":
            meter.spend(_own_size(meter, left) + _own_size(meter, right_operand))
            return left + right_operand
        weights = _own_size(meter, left), _own_size(meter, right_operand)
        if operator == "**":
            size = weights[0] * abs(right_operand) if isinstance(right_operand, int) and isinstance(left, int) else 0
        elif operator == "*":
            numbers = isinstance(left, int | float) and isinstance(right_operand, int | float)
            times = left if isinstance(left, int) else right_operand
            size = sum(weights) if numbers or not isinstance(times, int) else max(weights) * max(times, 1)
        elif operator == "%" and isinstance(left, str | bytes):
            size = sum(weights) + _widths(str(left), right_operand)
        else:
            size = sum(weights)
        meter.spend(1 + size)
        return super().call_binop(context, operator, left, right_operand)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        meter = _meter()
        owner = getattr(__obj, "__self__", None) if isinstance(__obj, BuiltinMethodType | MethodType) else None
        if isinstance(owner, str | bytes | int):
            args = tuple(list(_rounds(each)) if isinstance(each, GeneratorType) else each for each in args)
            meter.spend(meter.weight(owner) + sum(map(meter.weight, (*args, *kwargs.values()))))
            meter.spend(_growth_of_method(meter, owner, __obj.__name__, args, kwargs))
        meter.spend(UNITS_PER_CALL)
        found = super().call(__context, __obj, *args, **kwargs)
        meter.spend(meter.weight(found))
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__
        return _paying(wrapped, lambda *args, **kwargs: len(text) + _widths(text, (*args, *kwargs.values())))


def _own_size(meter: Meter, value: Any) -> int:
    """Return the size of a value without the values that it refers to."""
    if type(value) is str:
        return len(value) + 1
    return 1 + len(value) if isinstance(value, list | tuple | dict) else meter.weight(value)


def _growth_of_method(meter: Meter, owner: str | bytes | int, name: str, args: Any, kwargs: Any) -> int:
    """Return an upper bound for the size of a method's result, beyond the sizes of its object and its arguments.

    ``owner``: the object, a text or a number.
    """
    given = (*args, *kwargs.values())
    letters = meter.weight(owner)
    if name == "replace" and len(args) > 1:
        return _replaced(owner, *args[:2])
    if name in ("join", "translate"):
        return letters * sum(map(meter.weight, given))
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
        return sum(each for each in given if isinstance(each, int)) * (letters if name == "expandtabs" else 1)
    return 0


def _replaced(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    """Return the maximum number of characters that replacements may add."""
    return (len(str(text)) // max(len(str(old)), 1) + 1) * len(str(new))


def _widths(pattern: str, given: Any) -> int:
    """Return the maximum number of characters that a format's widths may add.

    Widths may be in the pattern or among the arguments.
    """
    numbers = [int(digits[:12]) for digits in re.findall(r"\d+", pattern)]
    values = [each for value in (given if isinstance(given, tuple) else (given,)) for each in _inside(value)]
    open_ended = "*" in pattern or re.search(r"\{[^{}]*\{", pattern)
    return sum(numbers) + (sum(abs(each) for each in values if isinstance(each, int)) if open_ended else 0)


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else (value,)


def _sum_of_lists(value: Any, attribute: Any = None, start: Any = 0) -> int:
    return 0 if isinstance(start, int | float) else _meter().weight(value) * (_meter().weight(value) >> 1)


GROWTH: Mapping[str, Callable[..., int]] = {
    "center": lambda value, width=80: width,
    "indent": lambda s, width=4, first=False, blank=False: (
        (width if isinstance(width, int) else len(width)) * (str(s).count("\n") + 1)
    ),
    "replace": _replaced,
    "join": lambda value, d="", attribute=None: len(str(d)) * _meter().weight(value),
    "format": lambda value, *args, **kwargs: _widths(str(value), (*args, *kwargs.values())),
    "batch": lambda value, linecount, fill_with=None: 0 if fill_with is None else linecount,
    "slice": lambda value, slices, fill_with=None: slices,
    "wordwrap": lambda s, width=79, break_long_words=True, wrapstring=None, break_on_hyphens=True: (
        len(str(s)) * len(wrapstring or "")
    ),
    "sum": _sum_of_lists,
    "urlize": lambda value, *args, **kwargs: len(str(value)) * sum(map(_meter().weight, (*args, *kwargs.values()))),
}
"""Functions that return how much a filter may enlarge its input, in units, by filter name. Filters that are not listed
do not repeat anything.
"""


REFERRING = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "do_", "sync_do_")
    for name in ("len", "default", "first", "last", "list", "reverse", "random", "items", "attr", "slice", "batch")
    + ("map", "select", "reject", "selectattr", "rejectattr")
)
"""Names of functions of filters that return their input or a reference to it, without reading its contents."""


def _paying(made: Callable[..., Any], growth: Callable[..., int] | None) -> Callable[..., Any]:
    """Wrap a filter or function so that its arguments, its maximum growth and its result are charged to the meter."""
    first = 1 if hasattr(made, "jinja_pass_arg") else 0  # of jinja itself

    @wraps(made)
    def paying(*args: Any, **kwargs: Any) -> Any:
        meter, given = _meter(), args[first:]
        if growth is not None and given and isinstance(given[0], GeneratorType):
            given = (list(_rounds(given[0])), *given[1:])
            args = (*args[:first], *given)
        size = partial(_own_size, meter) if made.__name__ in REFERRING else meter.weight
        meter.spend(UNITS_PER_CALL + sum(map(size, (*given, *kwargs.values()))))
        if growth is not None:
            meter.spend(growth(*given, **kwargs))
        found = made(*args, **kwargs)
        meter.spend(size(found))
        return found

    return paying


def _as_json(tojson: Callable[..., str]) -> Callable[..., str]:
    """Wrap the filter tojson so that its output, including indents, is charged while it is written."""

    @wraps(tojson)
    def paying(x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False) -> str:  # fmt: skip  # noqa: E501
        meter = _meter()
        if indent is None:
            meter.spend(meter.weight(x) * (1 if separators is None else meter.weight(separators)))
            return tojson(x, ensure_ascii, indent, separators, sort_keys)
        if isinstance(indent, int):
            meter.spend(max(indent, 0))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        pieces = []
        for piece in encoder.iterencode(x):
            meter.spend(len(piece))
            pieces.append(piece)
        return "".join(pieces)

    return paying


def _written_out(value: Any) -> Any:
    """Charge a value that is written into the text, a list or a slice, and return it."""
    meter = _meter()
    meter.spend(meter.weight(value))
    return value


def _rounds(values: Iterable[Any], letters: int = 0) -> Iterator[Any]:
    """Yield values. For each value, charge one loop iteration and ``letters`` characters of the template's own text."""
    meter = _meter()
    for value in values:
        meter.spend(1 + letters)
        yield value


def _joined(values: Iterable[Any]) -> str:
    """Implement the operator ``~``: charge the values and return them joined as a text."""
    meter = _meter()
    meter.spend(1 + sum(map(meter.weight, values)))
    return "".join(map(str, values))


def _entered(letters: int) -> str:
    """Charge ``letters`` characters of a macro's text. Returns "" so that a template can call it in its output."""
    _meter().spend(letters)
    return ""


OWN_FILTERS: Mapping[str, Callable[..., Any]] = {
    "pays for rounds": _rounds,
    "pays for a value": _written_out,
    "pays for a text": _joined,
    "pays for a macro": _entered,
}
"""Filters that charge costs, by names that cannot occur in a template."""


class _Paying(NodeTransformer):
    """Inserts filters that charge costs into operations of a template that are not calls."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        letters = _letters_in(node.body)
        node.iter = _filter(node.iter, "pays for rounds", nodes.Const(letters))
        if node.recursive:  # further iterations are calls
            node.body.insert(0, _paid(letters, node))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _paid(_letters_in(node.body), node))
        return node

    visit_CallBlock = visit_Macro  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "pays for a text")

    def visit_List(self, node: nodes.List) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        constant = all(isinstance(each, nodes.Const) for each in node.items)
        return node if constant else _filter(node, "pays for a value")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        constant = node.ctx != "load" or all(isinstance(each, nodes.Const) for each in node.items)
        return node if constant else _filter(node, "pays for a value")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "pays for a value")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "pays for a value") if isinstance(node.arg, nodes.Slice) else node


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _paid(letters: int, node: nodes.Node) -> nodes.Output:
    return nodes.Output([_filter(nodes.Const(letters, lineno=node.lineno), "pays for a macro")], lineno=node.lineno)


def _letters_in(body: Iterable[nodes.Node]) -> int:
    """Return the number of characters of literal text in a part of a template."""
    return sum(len(data.data) for node in body for data in node.find_all(nodes.TemplateData))
