"""JSON texts in cells and values of a row, as in tables of texts such as CSV."""

from __future__ import annotations

import re
from typing import Any

from lora_rocm.dataset.rows.row_cells import UnusableText
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json

ROW_FIX = "Repair it, or remove the row."
MESSAGES_FIX = (
    "Messages are mappings with role and content. If one column is a list of messages, the others are lists too."
)
MESSAGES_BEGIN = re.compile(r"""\s*\[\s*\{\s*['"](role|from)['"]\s*:""")
"""The start of a list of messages, in JSON and as Python prints it."""


def object_in(value: Any) -> Any:
    """The mapping in a JSON text; any other value is returned unchanged.

    Raises:
        UnusableText: it is JSON that cannot be read.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        found = parse_json(value)
    except NoJson:
        return value
    except BadJson as error:
        raise UnusableText(f"A JSON text in it cannot be read: {error}: {value!a:.40}.", ROW_FIX) from error
    return found if isinstance(found, dict) else value


def messages_or_text(cell: object) -> object:
    """A cell of prompts or answers. In a table of texts, such as CSV, a list of messages is JSON.

    Raises:
        UnusableText: it begins like such a list but is not valid JSON, such as a list printed by Python.
    """
    if not isinstance(cell, str) or not cell.lstrip().startswith("["):
        return cell
    try:
        found = parse_json(cell)
    except BadJson as error:
        if not MESSAGES_BEGIN.match(cell):
            return cell
        what = f"A cell that begins like a list of messages ({cell!a:.40}) cannot be read: {error}."
        raise UnusableText(what, MESSAGES_FIX) from error
    keys = [each.keys() if isinstance(each, dict) else () for each in found]
    has_whole = any({"role", "content"} <= {*each} or {"from", "value"} <= {*each} for each in keys)
    return found if has_whole or (found and all({"role", "from"} & {*each} for each in keys)) else cell


def parsed(text: str, what: str, fix: str) -> Any:
    """The value of a JSON text; the error's message begins with ``what``, and ``fix`` is its remedy."""
    try:
        return parse_json(text)
    except NoJson as error:
        raise UnusableText(f"{what} is a text that is not JSON: {error.detail}.", fix) from error
    except BadJson as error:
        raise UnusableText(f"{what} cannot be read: {error}.", ROW_FIX) from error
