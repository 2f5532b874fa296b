"""The page that lists the guides for users of other trainers, and its place in the navigation."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import docs_moving, docs_site


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Documentation with two guides, one of them for a trainer that the list does not have."""
    folder = tmp_path / "how-to"
    folder.mkdir()
    for name in ("moving-over-index.md", "moving-over-kohya.md", "moving-over-x.md", "a.md", "z.md"):
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")
    (folder / "index.md").write_text(
        "## One\n\n- [m](moving-over-index.md)\n\n## Two\n\n- [z](z.md)\n", encoding="utf-8"
    )
    return tmp_path


def test_every_guide_is_linked_once(docs: Path) -> None:
    text = docs_moving.page(docs)
    assert text.count("](moving-over-kohya.md)") == text.count("](moving-over-x.md)") == 1
    assert "](moving-over-onetrainer" not in text and "| OneTrainer |" in text
    real = docs_moving.page()
    assert all(real.count(f"]({name})") == 1 for name in docs_moving.guides())


def test_guides_follow_their_list_in_the_navigation(docs: Path) -> None:
    nav = docs_site.section(docs / "how-to", docs)
    below = ["how-to/moving-over-index.md", "how-to/moving-over-kohya.md", "how-to/moving-over-x.md"]
    assert [*filter(lambda entry: isinstance(entry, dict), nav)] == [{"One": below}, {"Two": ["how-to/z.md"]}]
    pages = docs_site.navigation(docs_moving.DOCS)
    assert next(entry["Start"] for entry in pages if "Start" in entry)[-1] == "choosing.md"
