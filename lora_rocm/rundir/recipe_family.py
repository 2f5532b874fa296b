"""Finds the model family of a run in the text of its recipe.

Parsing the whole recipe would take a hundred times as long.
"""

from __future__ import annotations

import re
from pathlib import Path

from lora_rocm.foundation.bounded_read import check_plain

MAX_FILE_BYTES = 1 << 30
MAX_READ_BYTES = 1 << 18
FAMILY = re.compile(r"[\s{,]family:\s*[\"']?([A-Za-z0-9_.-]+)")


def family_in(recipe: Path) -> str | None:
    """Return the family in a run's recipe; None if it is missing, or not written as this program writes it."""
    try:
        check_plain(recipe, MAX_FILE_BYTES)  # reading a pipe would wait forever
        with recipe.open("rb") as file:
            text = file.read(MAX_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    is_inside = False
    for line in text.splitlines():
        if line.startswith("model:"):
            is_inside = True
        elif line[:1] not in ("", " ", "#"):
            is_inside = False
        if is_inside and (found := FAMILY.search(line)):
            return found[1]
    return None
