"""Changes one key in the text of any recipe. Comments, order and all other lines stay as they are.

The place of the value comes from ruamel's node tree, and only that place is replaced. Where a text is written in an
unusual way (with anchors, for example), ruamel writes the whole text again, with its comments.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lora_rocm.recipe.recipe_text import written
from lora_rocm.recipe.yaml_tree import YamlSyntaxError, composed, parse_yaml, place_of

INDENT = "  "
COMMENT = re.compile(r"(\s+)(#.*)")


def set_value(text: str, section: str, key: str, value: object, spelling: str = "") -> str:
    """Return the text of a recipe with another value of a key. A missing key or section is added.

    Args:
        text: the recipe.
        section: name of the section.
        key: name of the key.
        value: its new value, as JSON.
        spelling: how a number is written, such as 1.0e-4; empty for the usual way.

    Raises:
        YamlSyntaxError: the text is not YAML, or its section is not a mapping.
    """
    wanted = _data_of(text)
    known = wanted.get(section)
    if not isinstance(known, dict | None):
        raise YamlSyntaxError(f"{section} has no keys", 1, 1)
    before = (known or {}).get(key)
    if before == value and type(before) is type(value) and parse_yaml(text).texts.get((section, key), "") == spelling:
        return text
    wanted[section] = {**(known or {}), key: value}
    changed = _spliced(text, section, key, value, spelling)
    if changed is not None and _reads_as(changed, wanted):
        return changed
    return _written_again(text, section, key, wanted)


def remove_value(text: str, section: str, key: str) -> str:
    """Return the text of a recipe without a key. A section without keys is removed too.

    Raises:
        YamlSyntaxError: the text is not YAML.
    """
    wanted = _data_of(text)
    known = wanted.get(section)
    if not isinstance(known, dict) or key not in known:
        return text
    wanted[section] = {name: value for name, value in known.items() if name != key}
    if not wanted[section]:
        del wanted[section]
    changed = _without(text, section, key)
    if changed is not None and _reads_as(changed, wanted):
        return changed
    return _written_again(text, section, key, wanted)


def _data_of(text: str) -> dict[str, object]:
    found = parse_yaml(text).value
    if found is not None and not isinstance(found, dict):
        raise YamlSyntaxError("the file has no sections", 1, 1)
    return dict(found or {})


def _reads_as(text: str, data: dict[str, object]) -> bool:
    try:
        tree = parse_yaml(text)
    except YamlSyntaxError:
        return False
    return not tree.problems and bool(tree.value == data or (not data and tree.value is None))


def _pair(node: Node | None, name: str) -> tuple[ScalarNode, Node] | None:
    """Return the nodes of a key and its value in a mapping, or None if there is no such key."""
    pairs = node.value if isinstance(node, MappingNode) else ()
    return next(((key, value) for key, value in pairs if isinstance(key, ScalarNode) and key.value == name), None)


def _is_missing(node: Node) -> bool:
    """Whether a key has no value. The node's place is then where the next token begins, after any comments."""
    return bool(node.start_mark.index == node.end_mark.index)


def _end(node: Node) -> int:
    """Return the index after a value. The end of a block is the end of its last value, without later comments."""
    if isinstance(node, MappingNode | SequenceNode) and not node.flow_style and node.value:
        last = node.value[-1]
        if isinstance(last, tuple) and _is_missing(last[1]):
            return int(last[0].end_mark.index) + 1
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    """Return the index of the end of the line that ``at`` is in."""
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _spliced(text: str, section: str, key: str, value: object, spelling: str) -> str | None:
    """Return the text with another value of a key; None if this cannot be done in its place."""
    lines = _lines_of(value, spelling)
    text = text if text.endswith("\n") or not text else f"{text}\n"
    root = composed(text) if text.strip() else None
    found = _pair(root, section)
    # A new section
    if found is None:
        gap = "\n" if text.strip() and not text.endswith("\n\n") else ""
        return f"{text}{gap}{section}:\n{_entry(key, lines, INDENT)}"
    name, content = found
    own = _pair(content, key)
    if isinstance(content, MappingNode) and content.flow_style:
        return _in_flow(text, content, own, key, lines)
    # A new key, in the last line of its section
    if own is None:
        if not isinstance(content, MappingNode):  # the section has no keys yet
            at = _line_end(text, name.end_mark.index)
            return f"{text[: at + 1]}{_entry(key, lines, INDENT)}{text[at + 1 :]}"
        at = _line_end(text, max(len(text[: _end(content)].rstrip()), content.start_mark.index))
        indent = " " * content.value[0][0].start_mark.column
        return f"{text[: at + 1]}{_entry(key, lines, indent)}{text[at + 1 :]}"
    # Another value
    key_node, old = own
    begin = text.index(":", key_node.end_mark.index) + 1
    end = begin if _is_missing(old) else max(_end(old), begin)
    end = max(begin, begin + len(text[begin:end].rstrip("\n")))
    if "\n" not in text[begin:end] and len(lines) == 1:
        return _in_line(text, begin, end, lines[0])
    # A value of several lines: the comment of the key stays, and items that stay keep their lines
    of_key = re.match(r"[ \t]*#[^\n]*", text[begin:]) if "\n" in text[begin:end] else None
    comment = of_key[0] if of_key else text[end : _line_end(text, end)] if "\n" not in text[begin:end] else ""
    indent = " " * key_node.start_mark.column
    if isinstance(old, SequenceNode) and isinstance(value, list) and not lines[0]:
        known = _items(text, old)
        lines = ["", *(f"{INDENT}- {known[each]}" if each in known else line for each, line in _itemised(value, lines))]
    first = f" {lines[0]}" if lines[0] else ""
    body = "".join(f"\n{indent}{line}" for line in lines[1:])
    return f"{text[:begin]}{first}{comment}{body}{text[_line_end(text, end) :]}"


def _items(text: str, node: SequenceNode) -> dict[str, str]:
    """Return the texts of a list in a block, each with the rest of its line."""
    if node.flow_style:
        return {}
    found = {}
    for item in node.value:
        rest = text[item.start_mark.index : _line_end(text, item.end_mark.index)]
        if isinstance(item, ScalarNode) and "\n" not in rest:
            found[str(item.value)] = rest
    return found


def _itemised(value: list[object], lines: Sequence[str]) -> list[tuple[object, str]]:
    """Return each item of a list of texts with its line; each line without an item, if items take several lines."""
    is_plain = len(lines) == len(value) + 1 and all(isinstance(each, str) for each in value)
    return list(zip(value, lines[1:], strict=True)) if is_plain else [(None, line) for line in lines[1:]]


def _in_line(text: str, begin: int, end: int, value: str) -> str:
    """Replace a value in its line. A comment after it stays in its column, if there is room."""
    after = text[end : _line_end(text, end)]
    if len(text[begin:end]) != len(value) + 1 and (comment := COMMENT.fullmatch(after)):
        room = len(text[begin:end]) + len(comment[1]) - len(value) - 1
        after = " " * max(room, 2) + comment[2]
    return f"{text[:begin]} {value}{after}{text[_line_end(text, end) :]}"


def _in_flow(
    text: str, content: MappingNode, own: tuple[ScalarNode, Node] | None, key: str, lines: Sequence[str]
) -> str | None:
    """Change a section that is written in braces. Only values of one line can be."""
    if len(lines) != 1:
        return None
    if own is not None:
        begin = text.index(":", own[0].end_mark.index) + 1
        spaces = len(text) - begin - len(text[begin:].lstrip(" "))
        end = begin + spaces if _is_missing(own[1]) else _end(own[1])
        return f"{text[:begin]} {lines[0]}{text[end:]}"
    at = content.end_mark.index - 1
    before = text[:at].rstrip()
    return f"{before}{', ' if content.value else ''}{key}: {lines[0]}{text[at:]}"


def _entry(key: str, lines: Sequence[str], indent: str) -> str:
    first = f" {lines[0]}" if lines[0] else ""
    return "".join([f"{indent}{key}:{first}\n", *(f"{indent}{line}\n" for line in lines[1:])])


def _without(text: str, section: str, key: str) -> str | None:
    found = _pair(composed(text), section)
    own = _pair(found[1], key) if found is not None else None
    if found is None or own is None:
        return None
    name, content = found
    if not isinstance(content, MappingNode) or content.flow_style:
        return None
    is_last = len(content.value) == 1
    begin = name.start_mark.index if is_last else own[0].start_mark.index
    line_begin = text.rfind("\n", 0, begin) + 1
    end = own[0].end_mark.index + 1
    end = end if _is_missing(own[1]) else max(_end(own[1]), end)
    end = begin + len(text[begin:end].rstrip("\n"))
    rest = text[_line_end(text, end) + 1 :]
    # The comment of the value may go on in the next lines, which are indented further than the key
    deeper = re.compile(rf"[ ]{{{own[0].start_mark.column + 1},}}#[^\n]*\n")
    while comment := deeper.match(rest):
        rest = rest[comment.end() :]
    return text[:line_begin] + rest


def _lines_of(value: object, spelling: str) -> list[str]:
    """Return a value as YAML: one line, or an empty line and the lines below the key."""
    if value is None:
        return ["null"]
    if isinstance(value, int | float) and not isinstance(value, bool) and spelling:
        return [spelling]
    if isinstance(value, bool | int | float | str):
        return [written(value)]
    if not value:
        return ["[]" if isinstance(value, list) else "{}"]
    if isinstance(value, list) and not any(isinstance(each, list | dict | str) for each in value):
        return [written(value)]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return ["", *(f"{INDENT}- {written(each)}" for each in value)]
    return ["", *(f"{INDENT}{line}" for line in block_text(value).splitlines())]


def block_text(value: object) -> str:
    """Return a list or a mapping as YAML in several lines."""
    yaml, stream = YAML(), io.StringIO()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=2, offset=0)
    yaml.dump(value, stream)
    return stream.getvalue()


def _written_again(text: str, section: str, key: str, wanted: dict[str, object]) -> str:
    """Return the text as ruamel writes it, with its comments, after the change. ``wanted``: its data then."""
    root = with_comments(text)
    content = wanted.get(section)
    if not isinstance(content, dict):
        del root[section]
    elif not isinstance(root.get(section), dict):
        root[section] = content
    elif key in content:
        root[section][key] = content[key]
    else:
        del root[section][key]
    changed = _dumped(root)
    if not _reads_as(changed, wanted):  # the section is another one's alias: it becomes a separate section
        root = with_comments(text)
        root[section] = content
        changed = _dumped(root)
    return changed


def with_comments(text: str) -> Any:  # untyped: a mapping of ruamel, with its comments
    """Load a text with its comments.

    Raises:
        YamlSyntaxError: a key is given twice, or ruamel cannot keep a comment between a key and a text that begins in
            the next line.
    """
    try:
        return _writer().load(text)
    except MarkedYAMLError as error:
        raise YamlSyntaxError(str(error.problem or error.context), *place_of(error)) from None
    except NotImplementedError:
        raise YamlSyntaxError("a comment is between a key and its text in the next line: move it", 1, 1) from None


def _writer() -> YAML:
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = 4096, True
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _dumped(root: object) -> str:
    stream = io.StringIO()
    _writer().dump(root, stream)
    return stream.getvalue()
