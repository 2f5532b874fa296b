"""Cells and values of a row that are texts and hold JSON, as tables of texts such as CSV have them."""

from __future__ import annotations

import re
from typing import Any

from lora_rocm.dataset.rows.row_cells import UnusableText
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json

ROW_FIX = "Repair it, or take the row away."
MESSAGES_FIX = "Messages are mappings with role and content. Beside a list of them, the other columns are lists too."
MESSAGES_BEGIN = re.compile(r"""\s*\[\s*\{\s*['"](role|from)['"]\s*:""")
"""How a list of messages begins, in JSON and as Python writes it."""


def object_in(value: Any) -> Any:
    """The mapping that a JSON text holds; any other value is itself.

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
    """A cell of prompts or answers. A table of texts, such as CSV, holds a list of messages as JSON.

    Raises:
        UnusableText: it begins like such a list and is none, for example as Python writes lists.
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
    """The value of a JSON text; ``what`` begins the message if there is none, and ``fix`` is its remedy."""
    try:
        return parse_json(text)
    except NoJson as error:
        raise UnusableText(f"{what} is a text that is no JSON: {error.detail}.", fix) from error
    except BadJson as error:
        raise UnusableText(f"{what} cannot be read: {error}.", ROW_FIX) from error
