"""Parses JSON that a user or another program wrote. No other module does.

The errors describe the fault in the text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.terminal_text import legible

MAX_SHOWN_LETTERS = 60
Pairs = list[tuple[str, Any]]


class BadJson(ValueError):
    """The text cannot be read as JSON. The message is a clause without a final full stop ("it is not JSON: ...")."""

    @property
    def sentence(self) -> str:
        """The message as a full sentence."""
        return f"{str(self)[:1].upper()}{str(self)[1:]}."


class NoJson(BadJson):
    """The text is not valid JSON or not in a valid encoding. ``detail``: the fault and its position."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"it is not JSON: {detail}")
        self.detail = detail


def parse_json(text: str | bytes, *, repeated_keys: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text, or its bytes in UTF-8, UTF-16 or UTF-32.
        repeated_keys: whether an object may repeat a key. The last value is then returned. True is only for texts
            with values that are not used.

    Raises:
        BadJson: the text cannot be read. This includes valid JSON that is nested too deeply, has an overlong number, or
            repeats a key. In these cases Python's own parser raises RecursionError or a bare ValueError, or keeps the
            last value.
    """
    hook: Callable[[Pairs], dict[str, Any]] | None = None if repeated_keys else _without_repeated_keys
    try:
        return json.loads(text, object_pairs_hook=hook)  # json: this is the one function that checks it
    except BadJson:
        raise
    except UnicodeDecodeError as error:
        raise NoJson(f"byte {error.start} is not {error.encoding} text") from error
    except json.JSONDecodeError as error:
        raise NoJson(str(error)) from error
    except RecursionError as error:
        raise BadJson("its lists or objects are nested too deeply") from error
    except ValueError as error:  # the only other cause: Python's limit of digits (``sys.get_int_max_str_digits``)
        raise BadJson("it has a whole number with too many digits") from error


def object_in(path: Path, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file.

    Empty if the file is missing, damaged or too large, or contains something else.
    """
    try:
        value = parse_json(read_plain(path, max_bytes))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _without_repeated_keys(pairs: Pairs) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BadJson(f'an object has the key "{legible(twice)[:MAX_SHOWN_LETTERS]}" twice')
    return found
