"""HTML pages that are single files: their content as data, which the template ``page.html.j2`` renders.

All markup is in templates, which escape every text. Only the still charts (``page_parts.charts``) and the program's own
styles and scripts (``page_parts.inlined``) are inserted as markup.
"""

from __future__ import annotations

import base64
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import ClassVar, Literal

from markupsafe import Markup

from lora_rocm.foundation.bounded_read import check_plain, read_plain
from lora_rocm.foundation.quiet import EVERYTHING
from lora_rocm.foundation.redact import private_of
from lora_rocm.page_parts.charts import Chart, Series
from lora_rocm.page_parts.inlined import inlined_files
from lora_rocm.page_parts.rendering import legible_value, new_environment
from lora_rocm.report.stories import ShownProblem, Stories

TEMPLATE, CHART_TEMPLATE = "page.html.j2", "chart.html.j2"
MAX_SIDE_PX = 512
MAX_IMAGE_BYTES, MAX_PIXELS = 1 << 27, 1 << 26
LOSSLESS_SIDE_PX = 256
MAX_PREVIEW_BYTES = 1 << 16
MAX_ROWS = 200
DATA = "data:image/"

Tone = Literal["", "soft", "good", "bad", "big"]
"""CSS class of a paragraph."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    block: ClassVar = "paragraph"
    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    block: ClassVar = "heading"
    text: str


@dataclass(frozen=True)
class Preformatted:
    """Text in which line breaks are kept."""

    block: ClassVar = "preformatted"
    text: str


@dataclass(frozen=True)
class Table:
    """A table of text. Rows beyond ``MAX_ROWS`` are replaced by their number."""

    block: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def shown(self) -> Sequence[Sequence[object]]:
        return self.rows[:MAX_ROWS]

    @property
    def num_more(self) -> int:
        return max(0, len(self.rows) - MAX_ROWS)


@dataclass(frozen=True)
class Picture:
    """An image embedded in the page. data: the file's content in base64."""

    block: ClassVar = "picture"
    format: Literal["png", "jpeg"]
    data: str
    label: str

    @property
    def source(self) -> str:
        return f"{DATA}{self.format};base64,{self.data}"


@dataclass(frozen=True)
class MissingImage:
    """A dash, shown in place of an image or text that cannot be read."""

    block: ClassVar = "unread"


@dataclass(frozen=True)
class PictureTable:
    """A table of images or short texts. rows: the label and the cells of each row."""

    block: ClassVar = "pictures"
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Picture | Preformatted | MissingImage]]]


@dataclass(frozen=True)
class Plot:
    """A chart of several lines with its title."""

    block: ClassVar = "plot"
    chart: Chart


@dataclass(frozen=True)
class Badge:
    """The state of a run, such as "finished"."""

    block: ClassVar = "badge"
    state: str


@dataclass(frozen=True)
class ProblemBox:
    """The box with an error."""

    block: ClassVar = "problem"
    problem: ShownProblem


@dataclass(frozen=True)
class StoryList:
    """The stories of a run."""

    block: ClassVar = "stories"
    stories: Stories


Block = (
    Paragraph
    | Heading
    | Preformatted
    | Table
    | Picture
    | MissingImage
    | PictureTable
    | Plot
    | Badge
    | ProblemBox
    | StoryList
)


@dataclass(frozen=True)
class ReportBox:
    """A box with a title."""

    title: str
    blocks: Sequence[Block]


def page(title: str, heading: str, intro: Sequence[Block], sections: Iterable[ReportBox | None]) -> str:
    """Return a complete HTML document that loads no other files.

    Args:
        title: the title of the browser window.
        heading: the main heading of the page.
        intro: blocks below the heading.
        sections: the boxes of the page; None entries are omitted.
    """
    kept = [section for section in sections if section is not None]
    has_charts = any(isinstance(block, Plot) for section in kept for block in section.blocks)
    values = {"title": title, "heading": heading, "intro": intro, "sections": kept, "has_charts": has_charts}
    return _rendered(TEMPLATE, own=inlined_files(), **values)


def notebook_chart(chart: Chart) -> str:
    """Return a still chart with its own colours as a piece of HTML, for another program's page."""
    return _rendered(CHART_TEMPLATE, chart=chart)


def _rendered(template: str, **values: object) -> str:
    """Fill in a template. Every text is escaped."""
    private = private_of(os.environ, platform.node(), ())

    def shown(value: object) -> object:
        """Remove home folders from a text of the page, because pages are sent to other people."""
        if not isinstance(value, str) or isinstance(value, Markup) or value.startswith(DATA):
            return legible_value(value)
        return legible_value(private.without_homes(value))

    return new_environment(Path(__file__).parent, shown).get_template(template).render(**values)


def section(title: str, *parts: Block | None) -> ReportBox | None:
    """Return a box with a title, or None if all parts are None."""
    blocks = [part for part in parts if part is not None]
    return ReportBox(title, blocks) if blocks else None


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Table | None:
    """Return a table, or None if there are no rows."""
    return Table(head, rows) if rows else None


def plot(title: str, series: Sequence[Series], x_label: str) -> Plot | None:
    """Return a chart, or None if there are no finite points."""
    chart = Chart(title, x_label, series)
    return Plot(chart) if chart.lines else None


def picture(path: Path, label: str, max_side_px: int = MAX_SIDE_PX) -> Picture | MissingImage:
    """Return an image file's image, reduced to ``max_side_px``, or a dash if it cannot be read.

    Only PNG, the format of previews, is read. Otherwise Pillow would detect the format from the content, regardless of
    the file's name, and for some formats it would start other programs.
    """
    from PIL import Image

    try:
        check_plain(path, MAX_IMAGE_BYTES)
        with EVERYTHING, Image.open(path, formats=("PNG",)) as file:
            if file.width * file.height > MAX_PIXELS:
                raise OSError("too large for a preview")
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, LookupError, TypeError, struct.error, Image.DecompressionBombError):
        return MissingImage()
    image.thumbnail((max_side_px, max_side_px))
    lossless = max(image.size) <= LOSSLESS_SIDE_PX
    buffer = BytesIO()
    image.save(buffer, **({"format": "PNG"} if lossless else {"format": "JPEG", "quality": 90}))
    return Picture("png" if lossless else "jpeg", base64.b64encode(buffer.getvalue()).decode("ascii"), label)


def preview(path: Path, max_side_px: int, label: str = "") -> Picture | Preformatted | MissingImage:
    """Return an image, or the text of a .txt file. ``label``: label of the image; if empty, the file's name."""
    if path.suffix != ".txt":
        return picture(path, label or path.name, max_side_px)
    try:
        return Preformatted(read_plain(path, MAX_PREVIEW_BYTES).decode("utf-8", "replace"))
    except OSError:
        return MissingImage()
