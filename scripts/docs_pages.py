"""The generated pages of the documentation: ``python -m scripts.docs_pages`` writes all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lora_rocm import json_reference
from scripts import docs_commands, docs_errors, docs_events, docs_moving, docs_python, docs_recipe
from scripts.docs_tables import filled

DOCS = Path(__file__).parents[1] / "docs"
WITH_TABLES = ("reference/gpus.md", "reference/environment.md", "reference/mitigations.md")
"""Pages with generated tables in prose."""


def writers() -> Mapping[str, Callable[[], str]]:
    """Path below docs -> what returns the content of the page, for each page that is generated."""
    return {
        "reference/json.md": json_reference.page,
        "reference/commands.md": docs_commands.page,
        "reference/events.md": docs_events.page,
        "reference/python.md": docs_python.page,
        "reference/errors.md": docs_errors.page,
        f"{docs_moving.FOLDER}/{docs_moving.NAME}": docs_moving.page,
        "reference/kohya-names.md": docs_recipe.names_page,
        **{f"reference/recipe/{name}": partial(str, text) for name, text in docs_recipe.pages().items()},
        **{name: partial(_with_tables, name) for name in WITH_TABLES},
    }


def _with_tables(name: str) -> str:
    return filled((DOCS / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for name, write in writers().items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write().encode())
