"""The generated pages of the documentation: ``python -m scripts.docs_pages`` writes all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lora_rocm import json_reference
from scripts import docs_commands, docs_errors, docs_events, docs_moving, docs_python, docs_recipe
from scripts.docs_tables import filled

DOCS = Path(__file__).parents[1] / "docs"
WITH_TABLES = ("reference/gpus.md", "reference/environment.md", "reference/mitigations.md")
"""Pages with generated tables in prose."""


def pages() -> Mapping[str, str]:
    """Path below docs -> content of each page that is generated."""
    return {
        "reference/json.md": json_reference.page(),
        "reference/commands.md": docs_commands.page(),
        "reference/events.md": docs_events.page(),
        "reference/python.md": docs_python.page(),
        "reference/errors.md": docs_errors.page(),
        f"{docs_moving.FOLDER}/{docs_moving.NAME}": docs_moving.page(),
        "reference/kohya-names.md": docs_recipe.names_page(),
        **{f"reference/recipe/{name}": text for name, text in docs_recipe.pages().items()},
        **{name: filled((DOCS / name).read_text(encoding="utf-8")) for name in WITH_TABLES},
    }


if __name__ == "__main__":
    for name, text in pages().items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
