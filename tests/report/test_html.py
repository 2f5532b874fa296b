"""Blocks of pages, and their rendering."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from lora_rocm.report.html import (
    MAX_ROWS,
    Block,
    Heading,
    MissingImage,
    Paragraph,
    Picture,
    PictureTable,
    Preformatted,
    Table,
    page,
    picture,
    plot,
    preview,
    section,
    table,
)
from lora_rocm.page_parts.charts import Series
from tests.wording import says

EVIL = "</title></style></pre>\"'> onload='x()' <script>alert(1)</script><img src=x onerror=y()>{{ 7*7 }}{% raw %}&amp;"


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def drawn(word: str) -> Structure:
    """A page with every kind of block, and one word in each of their texts."""
    curve = plot([Series(word, [(0, 1.0), (1, 2.0)], word), Series(word, [(0, 1.0)], "dots")], word)
    cells = (Preformatted(word), Picture("png", "", word), MissingImage())
    blocks: list[Block | None] = [Paragraph(word, "bad"), Heading(word), Preformatted(word), curve]
    blocks += [table([word], [[word]]), PictureTable([word], [(word, cells)])]
    return Structure(page(word, word, [Paragraph(word)], [section(word, *blocks), section(word), None]))


def test_no_text_becomes_markup() -> None:
    hostile, harmless = drawn(EVIL), drawn("word")
    assert hostile.elements == harmless.elements and hostile.text == harmless.text.replace("word", EVIL)
    assert {"table", "svg", "img", "pre", "h3"} <= {element[0] for element in hostile.elements}


def test_a_long_table_is_cut_short() -> None:
    html = page("t", "h", [], [section("s", Table([], [[number] for number in range(MAX_ROWS + 3)]))])
    assert html.count("<tr>") == MAX_ROWS and says(html, "report/and-3-more")


def test_empty_parts_vanish() -> None:
    assert section("title") is None and section("title", None) is None and table(["a"], []) is None
    assert plot([Series("a", [(0, float("nan"))])], "step") is None


def test_images_are_reduced_and_embedded(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise = Image.effect_noise((1200, 600), 90)
    noise.save(path)
    large, small = picture(path, "x"), picture(path, "small", 128)
    assert isinstance(large, Picture) and large.format == "jpeg" and len(large.data) < 400_000
    assert isinstance(small, Picture) and small.format == "png"


def test_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    for name in ("a.png", "missing.png", "missing.txt"):
        assert preview(tmp_path / name, 64) == MissingImage()
