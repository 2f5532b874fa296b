"""Reads ``result.json``. All readers call ``read_result_file``, so they agree on which results are valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.json_text import BadJson, parse_json

MAX_RESULT_BYTES = 1 << 24


def read_result_file(path: Path) -> dict[str, Any]:
    """The content of ``result.json``. Its paths must not be trusted.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, or a value has a type that this program would not write.
    """
    value = parse_json(read_plain(path, MAX_RESULT_BYTES))
    if not _is_result(value):
        raise BadJson("its values have different types than the result of a run")
    return dict(value)


def _is_result(value: object) -> bool:
    """Whether all values have the types that this program writes. Keys may be missing, as in earlier versions."""
    if not isinstance(value, dict) or not ("updates" in value or "exports" in value) or not _is_state(value):
        return False
    exports = value.get("exports", [])
    return (
        isinstance(exports, list)
        and all(
            isinstance(entry, dict)
            and isinstance(entry.get("format"), str)
            and isinstance(entry.get("path", ""), str)
            and _is_state(entry)
            and _are_digests(entry.get("files", []))
            for entry in exports
        )
        and _are_digests(value.get("checkpoint_loras", []))
    )


def _is_state(value: dict[str, Any]) -> bool:
    updates = value.get("updates", 1)
    return type(updates) is int and updates > 0 and isinstance(value.get("checkpoint", ""), str)


def _are_digests(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, dict)
        and isinstance(value.get("path"), str)
        and type(value.get("bytes")) is int
        and isinstance(value.get("sha256"), str)
        for value in values
    )
