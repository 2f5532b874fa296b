"""Tables of texts that a browser sends into the page's folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from lora_rocm.dataset.sources.folders import TABLE_SUFFIXES
from lora_rocm.errors import UserError
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json
from lora_rocm.foundation.units import size_text
from lora_rocm.page_parts.texts import t
from lora_rocm.ui.image_set.uploads import Received, plain_name, received, write_new

MAX_TABLE_BYTES = 1 << 28
OF_LINES = (".jsonl", ".ndjson")
OF_TEXT = (*OF_LINES, ".json", ".csv")


def receive_tables(folder: Path, files: Iterable[tuple[str, BinaryIO]]) -> Received:
    """Save tables of texts in a folder. A file that exists is never replaced.

    Args:
        folder: the folder.
        files: name, as the browser sends it, and content of each file.
    """
    return received(files, lambda name, file: _saved(folder, name, file))


def _saved(folder: Path, name: str, file: BinaryIO) -> str:
    plain = plain_name(name)
    suffix = os.path.splitext(plain)[1].lower()
    if suffix not in TABLE_SUFFIXES:
        raise _refused(t("texts.refused_suffix"))
    content = file.read(MAX_TABLE_BYTES + 1)
    if len(content) > MAX_TABLE_BYTES:
        raise _refused(t("texts.refused_size", size=size_text(MAX_TABLE_BYTES)))
    if suffix in OF_TEXT:
        _require_rows(content, suffix)
    write_new(folder / plain, content)  # of the same file again, the recipe can be made now
    return plain


def _require_rows(content: bytes, suffix: str) -> None:
    """Refuse a file with content that does not fit its name. Training reads the whole file and names wrong rows.

    Raises:
        UserError: upload-refused.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _refused(t("texts.refused_text")) from None
    if suffix in OF_LINES:
        first = next((line for line in text.splitlines() if line.strip()), "")
        try:
            is_row = isinstance(parse_json(first), dict)
        except (BadJson, NoJson):
            is_row = False
        if not is_row:
            raise _refused(t("texts.refused_row"))


def _refused(what: str) -> UserError:
    return UserError("upload-refused", what, fix="Choose another file.")
