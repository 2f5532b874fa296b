"""Caches the output of slow tools in one small file of the program's folder. Standard library only."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from lora_rocm.errors import StorageError
from lora_rocm.foundation.files import write_atomic

FORMAT = 1
MEMORY_FILE = "remembered.json"


def recalled(folder: Path | None, tool: str, key: str) -> dict[str, Any] | None:
    """The cached entry of a tool under this key, or None. A damaged file is ignored."""
    entry = _entries(folder).get(tool)
    if not isinstance(entry, dict) or entry.get("key") != key:
        return None
    said, failed = entry.get("said"), entry.get("failed")
    return entry if isinstance(said, str) or isinstance(failed, str) else None


def remember(folder: Path | None, tool: str, entry: dict[str, Any]) -> None:
    """Cache a tool's last output. If the file cannot be written, the next probe is only slower."""
    if folder is None:
        return
    text = json.dumps({"format": FORMAT, "tools": {**_entries(folder), tool: entry}})
    with contextlib.suppress(StorageError):
        write_atomic(folder / MEMORY_FILE, text.encode("utf-8"), read_back=False)


def _entries(folder: Path | None) -> dict[str, Any]:
    if folder is None:
        return {}
    try:
        whole = json.loads((folder / MEMORY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(whole, dict) or whole.get("format") != FORMAT or not isinstance(whole.get("tools"), dict):
        return {}
    return dict(whole["tools"])
