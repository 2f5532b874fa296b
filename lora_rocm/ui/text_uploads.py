"""Tables of texts that a browser sends into the page's folder, examined by training's own reader."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lora_rocm.commands.output import Failure
from lora_rocm.dataset.rows.plain_prompts import is_plain, plain_prompts_warning
from lora_rocm.dataset.rows.records import Completion, Conversation, Pair, Record, read
from lora_rocm.dataset.sources.folders import TABLE_SUFFIXES
from lora_rocm.errors import DataError, Problem, UserError
from lora_rocm.foundation.json_text import BadJson, NoJson, parse_json
from lora_rocm.foundation.units import size_text
from lora_rocm.page_parts.texts import t
from lora_rocm.ui.image_set.uploads import Received, plain_name, received, write_new

MAX_TABLE_BYTES = 1 << 28
OF_LINES = (".jsonl", ".ndjson")
OF_TEXT = (*OF_LINES, ".json", ".csv")
MAX_SHOWN_LETTERS = 600


@dataclass(frozen=True)
class ArrivedTable:
    """A table of texts, as the function reads it that training uses.

    Attributes:
        usable: number of rows that can be trained on.
        skipped: number of other rows.
        first: parts of the first usable row, each with its role; the role of a plain text is empty.
        first_problem: place, reason and remedy of the first unusable row, or None.
        warnings: warnings about the format of the rows.
        failure: why no row can be trained on, or None.
    """

    usable: int
    skipped: int
    first: Sequence[tuple[str, str]]
    first_problem: Problem | None
    warnings: Sequence[str]
    failure: Failure | None


def examined_table(table: Path) -> ArrivedTable:
    """Read all rows of a table as training would, as texts or as pairs of answers."""
    from lora_rocm.dataset.sources.text_scan import count_table

    try:
        found = count_table(str(table))
    except DataError as error:
        return ArrivedTable(0, 0, (), None, (), Failure.of(error))
    problem = next(iter(found.aside.first), None)
    first = read(found.first)
    warnings = [plain_prompts_warning(0, pairs=isinstance(first, Pair))] if is_plain(first) else []
    return ArrivedTable(found.of_source.total(), found.aside.count, parts_of(first), problem, warnings, None)


def parts_of(record: Record) -> list[tuple[str, str]]:
    """Return the parts of a record for display, each with its role. Long ones are cut."""
    if isinstance(record, Pair):
        rejected = parts_of(record.rejected)[-1]
        *asked, chosen = parts_of(record.chosen)
        return [*asked, ("chosen", chosen[1]), ("rejected", rejected[1])]
    if isinstance(record, Completion):
        return [("prompt", _cut(record.prompt)), ("completion", _cut(record.completion))]
    if isinstance(record, Conversation):
        return [(str(each["role"]), _cut(str(each.get("content") or ""))) for each in record.messages]
    return [("", _cut(record))]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_LETTERS else f"{text[:MAX_SHOWN_LETTERS]} …"


def receive_tables(folder: Path, files: Iterable[tuple[str, BinaryIO]]) -> tuple[Received, Mapping[str, ArrivedTable]]:
    """Save tables of texts in a folder, and examine them. A file that exists is never replaced.

    A new file without a usable row is removed, so that the repaired file can have its name.

    Args:
        folder: the folder.
        files: name, as the browser sends it, and content of each file.
    """
    tables = dict[str, ArrivedTable]()

    def save(name: str, file: BinaryIO) -> str:
        plain, is_new = _saved(folder, name, file)
        tables[plain] = examined_table(folder / plain)
        if is_new and tables[plain].failure is not None:
            (folder / plain).unlink()  # writes: this request made the file
        return plain

    return received(files, save), tables


def _saved(folder: Path, name: str, file: BinaryIO) -> tuple[str, bool]:
    """Save a table, and return its name and whether the file is new."""
    plain = plain_name(name)
    suffix = os.path.splitext(plain)[1].lower()
    if suffix not in TABLE_SUFFIXES:
        raise _refused(t("texts.refused_suffix", accepted=", ".join(TABLE_SUFFIXES)))
    content = file.read(MAX_TABLE_BYTES + 1)
    if len(content) > MAX_TABLE_BYTES:
        raise _refused(t("texts.refused_size", size=size_text(MAX_TABLE_BYTES)))
    if suffix in OF_TEXT:
        _require_rows(content, suffix)
    return plain, write_new(folder / plain, content)  # of the same file again, the recipe can be made now


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
