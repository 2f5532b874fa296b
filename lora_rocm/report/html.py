"""HTML building blocks of the report. All external text is escaped here."""

from __future__ import annotations

import base64
import struct
import warnings
from collections.abc import Iterable, Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from lora_rocm.foundation.bounded_read import check_plain, read_plain

MAX_SIDE_PX = 512
MAX_IMAGE_BYTES, MAX_PIXELS = 1 << 27, 1 << 26
LOSSLESS_SIDE_PX = 256
MAX_PREVIEW_BYTES = 1 << 16
MAX_ROWS = 200


def page(title: str, sections: Iterable[str]) -> str:
    """A whole, self-contained HTML document."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head><body><main>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A titled box; an empty string if all parts are empty."""
    content = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def header(title: str, *parts: str) -> str:
    """The head of the page."""
    return f"<header><h1>{escape(title)}</h1>{''.join(parts)}</header>"


def paragraph(text: object, kind: str = "") -> str:
    """A paragraph. ``kind``: soft, good, bad or big."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(str(text))}</p>"


def preformatted(text: str) -> str:
    """Preformatted text."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells are text; empty text where there are no rows. Beyond ``MAX_ROWS`` it only says how many more there are."""
    if not rows:
        return ""
    first = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>" if head else ""
    shown = rows[:MAX_ROWS]
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in shown)
    more = paragraph(f"... and {len(rows) - MAX_ROWS} more") if len(rows) > MAX_ROWS else ""
    return f"<table>{first}{body}</table>{more}"


def image_tag(path: Path, label: str, max_side_px: int = MAX_SIDE_PX) -> str:
    """An ``<img>`` with the image data inline, reduced to ``max_side_px``; a dash if it cannot be read.

    Only PNG is read, the format of previews. A file in somebody's run directory has the format that its content says,
    and for some formats Pillow would start other programs.
    """
    from PIL import Image

    try:
        check_plain(path, MAX_IMAGE_BYTES)
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=("PNG",)) as file:
            if file.width * file.height > MAX_PIXELS:
                raise OSError("no preview is so large")
            image = file.convert("RGB")
    except (OSError, ValueError, SyntaxError, LookupError, TypeError, struct.error, Image.DecompressionBombError):
        return '<span class="soft">-</span>'
    image.thumbnail((max_side_px, max_side_px))
    lossless = max(image.size) <= LOSSLESS_SIDE_PX
    buffer = BytesIO()
    image.save(buffer, **({"format": "PNG"} if lossless else {"format": "JPEG", "quality": 90}))
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    kind = "png" if lossless else "jpeg"
    return f'<img src="data:image/{kind};base64,{data}" alt="{escape(label)}" title="{escape(label)}">'


def preview_tag(path: Path, max_side_px: int, label: str = "") -> str:
    """An image, or the text of a .txt file; a dash if it cannot be read. ``label``: of an image; empty: its name."""
    if path.suffix != ".txt":
        return image_tag(path, label or path.name, max_side_px)
    try:
        return preformatted(read_plain(path, MAX_PREVIEW_BYTES).decode("utf-8", "replace"))
    except OSError:
        return "-"


def image_table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table of images. ``rows``: (label, results of ``image_tag``)."""
    first = "<tr><th></th>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
    body = "".join(
        f"<tr><td>{escape(label)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
        for label, cells in rows
    )
    return f'<div class="wide"><table>{first}{body}</table></div>'
