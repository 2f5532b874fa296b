"""Parse YAML text into plain values with their line numbers.

The parser uses ruamel's node tree, not its constructors. The result has, for any tags in the file, only strings,
numbers, true/false, null, lists and mappings. All problems of a file are found in one pass.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from lora_rocm.errors import Problem
from lora_rocm.foundation.quiet import Quiet

Key = tuple[str | int, ...]

REUSED_ANCHORS = Quiet(ReusedAnchorWarning)  # legal YAML: the last one counts
MAX_DEPTH = 20
MAX_NODES = 20_000  # with aliases expanded: a few lines of aliases can expand to billions of values
MAX_PROBLEMS = 50
MAX_OPEN_BRACKETS, BRACKET = 200, re.compile(r"[][{}]")
STANDARD_TAG = "tag:yaml.org,2002:"
BOOLEANS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


ESCAPE_FIX = (
    r"In double quotes a backslash begins an escape, as in \n. Write a Windows path in single quotes, 'C:\pics', "
    "or with forward slashes, C:/pics."
)
SYNTAX_FIXES = {
    "a tab": "Replace the tab by spaces.",
    "escape": ESCAPE_FIX,
    "quoted scalar": "Close the quotation mark. Inside single quotes, write '' for one.",
    "mapping values are not allowed": "Indent the keys of a section alike, and quote text that contains a colon.",
    "expected ':'": "Write a colon after the key.",
    "alias": "Quote text that begins with * or &.",
    "cannot start any token": "Quote text that begins with this character.",
    "single document": "Remove the line with ---: a recipe is one document.",
    "']'": "Close the bracket.",
    "'}'": "Close the bracket.",
    "special characters": "Remove the character; it may be invisible in an editor.",
    "deeply": "Remove brackets or levels: no key of a recipe is that deep.",
}
"""The fix to show, keyed by words in a syntax error. The first match is used."""


class YamlSyntaxError(Exception):
    """The text is not valid YAML. ``line`` and ``column`` start at 1; ``fix`` is the remedy."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line, self.column = line, column
        otherwise = "Compare this line and the one above with a recipe that ships: colons, quotes, indentation."
        self.fix = next((fix for words, fix in SYNTAX_FIXES.items() if words in message), otherwise)


class Span(NamedTuple):
    """Place of a value in a file. line: from 1. column: from 0. width: number of characters on this line."""

    line: int
    column: int
    width: int


@dataclass
class YamlTree:
    """A parsed document.

    value: the content as plain Python values.
    lines: line number (from 1) of every key and list item.
    texts: spelling in the file of each number, true, false or null, such as 007 for 7, or yes for true.
    spans: place of the value of every key and list item.
    problems: each problem as (key, line, what, fix).
    """

    value: Any = None
    lines: dict[Key, int] = field(default_factory=dict)
    texts: dict[Key, str] = field(default_factory=dict)
    spans: dict[Key, Span] = field(default_factory=dict)
    problems: list[tuple[Key, int, str, str]] = field(default_factory=list)

    def place_problems(self, origin: str) -> list[Problem]:
        return [
            Problem(f"{origin}:{line} {dotted(key)}".rstrip(), what, fix, keys=(dotted(key),) if key else ())
            for key, line, what, fix in self.problems
        ]


def dotted(key: Key) -> str:
    """Return a key as users write it: ``("data", "sources", 0, "path")`` becomes ``data.sources[0].path``."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def value_at(data: Any, key: Key, otherwise: Any = None) -> Any:
    """Return the value of a key in nested data, or ``otherwise`` if it is missing."""
    for part in key:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return otherwise
    return data


def place_of(error: MarkedYAMLError) -> tuple[int, int]:
    """Return the line and column of an error of ruamel, both from 1."""
    mark = error.problem_mark or error.context_mark
    return (mark.line + 1, mark.column + 1) if mark else (1, 1)


def composed(text: str) -> Node | None:
    """Return the nodes of a YAML text, each with its place; None if it has no content.

    The round-trip composer ("rt") is not used: it leaves bell characters in folded texts (``>``) with an empty line,
    and it fails if a comment is between a key and a text in the next line.

    Raises:
        YAMLError: the text is not YAML, or has several documents.
    """
    with REUSED_ANCHORS:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    return node


def parse_yaml(text: str) -> YamlTree:
    """Parse a text that is one YAML document.

    Raises:
        YamlSyntaxError: the text is not YAML, has several documents, or is nested too deeply.
    """
    _refuse_deep_brackets(text)
    try:
        node = composed(text)
    except MarkedYAMLError as error:
        line, column = place_of(error)
        raise YamlSyntaxError(_syntax_message(text, error, line), line, column) from None
    except RecursionError:
        raise YamlSyntaxError("nested far too deeply", 1, 1) from None
    except ReaderError as error:  # a control character
        line, begin = text.count("\n", 0, error.position) + 1, text.rfind("\n", 0, error.position) + 1
        raise YamlSyntaxError(str(error).splitlines()[0], line, error.position - begin + 1) from None
    except (YAMLError, ValueError) as error:  # ValueError: escapes beyond Unicode
        raise YamlSyntaxError(str(error).splitlines()[0], 1, 1) from None
    tree = YamlTree()
    if node is not None:
        tree.value = _NodeReader(tree).read(node, ())
    return tree


def _refuse_deep_brackets(text: str) -> None:
    """Raise YamlSyntaxError if brackets are nested deeply. The library would take minutes for a thousand brackets."""
    depth = 0
    for bracket in BRACKET.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_OPEN_BRACKETS:
            line = text.count("\n", 0, bracket.start()) + 1
            raise YamlSyntaxError("nested far too deeply", line, 1)


def _syntax_message(text: str, error: MarkedYAMLError, line: int) -> str:
    lines = text.splitlines()
    indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())] if line <= len(lines) else ""
    if "\t" in indent:
        return "a tab is used for indentation; YAML wants spaces"
    parts = [part for part in (error.context, error.problem) if part]
    return ": ".join(parts) or "not valid YAML"


class _NodeReader:
    """Reads each node once. An unusable value becomes None and is reported as a problem."""

    def __init__(self, tree: YamlTree) -> None:
        self.tree, self.count = tree, 0

    def problem(self, node: Node, key: Key, what: str, fix: str = "") -> None:
        if len(self.tree.problems) < MAX_PROBLEMS:
            self.tree.problems.append((key, node.start_mark.line + 1, what, fix))

    def counted(self, node: Node, key: Key) -> None:
        self.count += 1
        if self.count > MAX_NODES or len(key) > MAX_DEPTH:
            mark = node.start_mark
            raise YamlSyntaxError("nested too deeply, or too large for a recipe", mark.line + 1, mark.column + 1)

    def read(self, node: Node, key: Key, key_node: Node | None = None) -> Any:
        self.counted(node, key)
        begin, end = node.start_mark, node.end_mark
        if begin.index == end.index and key_node is not None:  # a missing value is where the next token begins
            begin = end = key_node.end_mark
        self.tree.spans[key] = Span(
            begin.line + 1, begin.column, end.column - begin.column if end.line == begin.line else 0
        )
        if isinstance(node, MappingNode):
            return self.read_mapping(node, key)
        if isinstance(node, SequenceNode):
            for index, item in enumerate(node.value):
                self.tree.lines[(*key, index)] = item.start_mark.line + 1
            return [self.read(item, (*key, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        return self.read_scalar(node, key)

    def read_mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            self.counted(key_node, key)  # duplicate keys count too
            name = key_node.value
            if not isinstance(key_node, ScalarNode) or not is_clean(name):
                self.problem(key_node, key, "a key has to be plain text")
                continue
            here = (*key, name)
            if key_node.tag == STANDARD_TAG + "merge":
                self.problem(key_node, here, "merge keys are not supported", "Write `base: other.yaml` at the top.")
            elif name in result:
                first = self.tree.lines[here]
                self.problem(key_node, here, f"is given twice, first on line {first}", "Keep one of them.")
            else:
                self.tree.lines[here] = key_node.start_mark.line + 1
                result[name] = self.read(value_node, here, key_node)
        return result

    def read_scalar(self, node: ScalarNode, key: Key) -> Any:
        tag, text = str(node.tag), node.value
        if not is_clean(text):
            self.problem(node, key, f"{text!a:.60} has characters that are not allowed here")
            return None
        try:
            value = _scalar(tag, text)
            if not isinstance(value, str):
                self.tree.texts[key] = text
            return value
        except (ValueError, KeyError):
            if tag == STANDARD_TAG + "float":
                named = "inf" in text.lower() or "nan" in text.lower()
                fix = "Write a number in digits, or remove the key." if named else "Write a smaller number."
                self.problem(node, key, f"expected a finite number, got {text:.60}", fix)
            else:
                self.problem(node, key, f"{text!a:.60} is not a usable value", "Quote text, and use no tag (!).")
            return None


def is_clean(text: Any) -> bool:
    """Return whether the value is a string without NUL and lone surrogates, fit for printing and for file names."""
    return isinstance(text, str) and "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def _scalar(tag: str, text: str) -> Any:
    """Return the value of a scalar. Raise ValueError or KeyError if it is not a plain value."""
    match tag.removeprefix(STANDARD_TAG):
        case "str" | "timestamp":
            return text
        case "null":
            return None
        case "bool":
            return BOOLEANS[text.lower()]
        case "int":
            return _integer(text.replace("_", ""))
        case "float":
            number = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            if not math.isfinite(number):
                raise ValueError(text)
            return number
        case _:
            raise ValueError(tag)


def _integer(text: str) -> int:
    unsigned = text.lstrip("+-").lower()
    base = {"0x": 16, "0o": 8, "0b": 2}.get(unsigned[:2], 10)
    return int(text, base)
