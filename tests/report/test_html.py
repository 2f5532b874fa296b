"""Blocks of pages, and their rendering."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from lora_rocm.page_parts.charts import Series
from lora_rocm.page_parts.inlined import inlined_files
from lora_rocm.report.html import (
    MAX_ROWS,
    Badge,
    Block,
    Heading,
    MissingImage,
    Paragraph,
    Picture,
    PictureTable,
    Preformatted,
    ProblemBox,
    StoryList,
    Table,
    page,
    picture,
    plot,
    preview,
    section,
    table,
)
from lora_rocm.report.stories import ShownProblem, Stories, Story
from tests.wording import says

EVIL = "</title></style></pre>\"'> onload='x()' <script>alert(1)</script><img src=x onerror=y()>{{ 7*7 }}{% raw %}&amp;"


class Structure(HTMLParser):
    """The elements of a page with the names of their attributes, its text, and its scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.text = ""
        self.own: dict[int, str] = {}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:
            place = len(self.elements)
            self.own[place] = self.own.get(place, "") + data
        else:
            self.text += data


def drawn(word: str) -> Structure:
    """A page with every kind of block, and one word in each of their texts."""
    curve = plot(word, [Series(word, [(0, 1.0), (1, 2.0)], word), Series(word, [(0, 1.0)], "dots")], word)
    told = StoryList(Stories([Story("failure", word, word, [(word, word)])], 1, word))
    cells = (Preformatted(word), Picture("png", "", word), MissingImage())
    blocks: list[Block | None] = [Paragraph(word, "bad"), Heading(word), Preformatted(word), curve]
    blocks += [table([word], [[word]]), PictureTable([word], [(word, cells)]), told]
    blocks += [Badge("failed"), ProblemBox(ShownProblem(word, word, word, word))]
    return Structure(page(word, word, [Paragraph(word)], [section(word, *blocks), section(word), None]))


def test_no_text_becomes_markup() -> None:
    hostile, harmless = drawn(EVIL), drawn("word")
    assert hostile.elements == harmless.elements and hostile.own == harmless.own
    assert hostile.text == harmless.text.replace("word", EVIL)
    assert {"table", "svg", "img", "pre", "h3"} <= {element[0] for element in hostile.elements}


def test_the_policy_allows_the_own_scripts_and_styles_alone() -> None:
    found = drawn(EVIL)
    policy = inlined_files().policy
    digests = [hashlib.sha256(text.encode("utf-8")).digest() for text in found.own.values()]
    hashes = {base64.b64encode(digest).decode("ascii") for digest in digests}
    assert len(found.own) == 3 and set(re.findall("'sha256-([^']+)'", policy)) == hashes
    assert "unsafe" not in policy and "http" not in policy and policy.startswith("default-src 'none'")
    assert all("</script" not in text and "<!--" not in text for text in found.own.values())


def test_a_page_without_charts_has_no_scripts() -> None:
    assert "<script" not in page("t", "h", [], [section("s", Paragraph("a"))])


def test_a_long_table_is_cut_short() -> None:
    html = page("t", "h", [], [section("s", Table([], [[number] for number in range(MAX_ROWS + 3)]))])
    assert html.count("<tr>") == MAX_ROWS and says(html, "report/and-3-more")


def test_empty_parts_vanish() -> None:
    assert section("title") is None and section("title", None) is None and table(["a"], []) is None
    assert plot("a", [Series("a", [(0, float("nan"))])], "step") is None


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
