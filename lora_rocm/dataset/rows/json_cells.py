"""JSON texts in the cells of a row. Tables of texts, such as CSV, store lists and mappings in this format."""

from __future__ import annotations

import re
from typing import Any

from lora_rocm.dataset.rows.row_cells import UnusableText
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json

ROW_FIX = "Repair the JSON, or remove the row."
MESSAGES_FIX = (
    "Write messages as mappings with role and content. If one column is a list of messages, write the others as lists."
)
MESSAGES_BEGIN = re.compile(r"""\s*\[\s*\{\s*['"](role|from)['"]\s*:""")
"""Matches the start of a list of messages, either as JSON or as printed by Python."""


def object_in(value: Any) -> Any:
    """Return the parsed mapping if a value is the JSON text of one; any other value is returned unchanged.

    Raises:
        UnusableText: the text is JSON that cannot be read.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        found = parse_json(value)
    except NoJson:
        return value
    except BadJson as error:
        raise UnusableText(f"A JSON text in the row cannot be read: {error}: {value!a:.40}.", ROW_FIX) from error
    return found if isinstance(found, dict) else value


def messages_or_text(cell: object) -> object:
    """Return the parsed list of messages if a cell is the JSON text of one, as in CSV tables.

    Any other cell is returned unchanged.

    Raises:
        UnusableText: the text begins like a list of messages but is not valid JSON, such as a list printed by Python.
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
    """Parse a JSON text.

    Args:
        text: the JSON text.
        what: beginning of the error message, such as "The column tools".
        fix: remedy in the error if the text is not JSON.

    Raises:
        UnusableText: the text cannot be parsed.
    """
    try:
        return parse_json(text)
    except NoJson as error:
        raise UnusableText(f"{what} is a text that is not JSON: {error.detail}.", fix) from error
    except BadJson as error:
        raise UnusableText(f"{what} cannot be read: {error}.", ROW_FIX) from error
