"""Finds texts: each ``.txt`` file of a folder is a sample, and each row of a table. Odd ones are set aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_rocm.dataset.folders import shown, source_folder, walk_texts
from lora_rocm.dataset.hf_datasets import DatasetRow
from lora_rocm.dataset.left_out import NUM_NAMED
from lora_rocm.dataset.progress import QUIET_S, Progress, Report, ignore
from lora_rocm.dataset.records import UnusableText, encodable, record_of, written
from lora_rocm.dataset.row_reference import reference
from lora_rocm.dataset.sample_table import Sample, Samples
from lora_rocm.dataset.scan import Scan, scan
from lora_rocm.dataset.text_rows import rows_of
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import DataSection, Recipe, ResolvedSource

MAX_TEXT_BYTES = 1 << 24
Parts = Callable[[str], Sequence[str]]
"""The samples that a text is cut into. Raises UnusableText."""


def _whole(text: str) -> Sequence[str]:
    return (text,)


@dataclass
class _Findings:
    """Results collected from all sources."""

    samples: Samples
    report: Report
    parts: Parts
    pairs: bool = False
    set_aside: list[Problem] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    lasting: bool = True

    def add(self, sample: Sample, where: str, text: str, position: int | None = None) -> None:
        """Add the samples of a text, which are told apart by numbers if there are several.

        ``position``: of its row in the table (``text_rows.Row``).
        """
        try:
            parts = self.parts(text)
        except UnusableText as error:
            self.set_aside.append(Problem(where, error.what, error.fix))
            return
        for number, part in enumerate(parts):
            key = sample.key if len(parts) == 1 else f"{sample.key}#{number}"
            at = None if part == text else number
            stored = part if position is None else reference(part, position, at, self.pairs)
            self.samples.append(replace(sample, key=key, caption=stored))


def find_samples(recipe: Recipe, report: Report = ignore, *, copies: bool = True, parts: Parts = _whole) -> Scan:
    """Find the samples of a recipe's family, in a fixed order: texts, or images with their captions.

    For arguments and errors see ``scan`` and ``scan_texts``.
    """
    if recipe.spec.trains_on_texts:
        return scan_texts(recipe.data, report, parts, pairs=recipe.objective.compares_pairs)
    return scan(recipe.data, report, copies=copies)


def scan_texts(data: DataSection, report: Report = ignore, parts: Parts = _whole, *, pairs: bool = False) -> Scan:
    """Find every text of every source, in a fixed order. The text is the sample's caption; width and height are 0.

    Args:
        data: the data section of the recipe.
        report: receives the progress if there are very many texts.
        parts: cuts a text, or a record of a table (``records.written``), into samples.
        pairs: a row is a pair of answers.

    Raises:
        DataError: a source cannot be read or has no texts, or no text is usable.
    """
    sources = data.resolved_sources()
    found = _Findings(Samples(sources), report, parts, pairs)
    for index, options in enumerate(sources):  # texts have no resolution, so each is one of the recipe's
        add = _scan_table if options.path is None else _scan_folder
        add(found, index, options, f"sources[{index}]/" if len(sources) > 1 else "")
    if not found.samples:
        aside = found.set_aside
        raise DataError(
            "no-usable-texts",
            f"Of {count_text(len(aside), 'text')} none can be used.",
            where="; ".join(f"{problem.where}: {problem.what}" for problem in aside[:NUM_NAMED]),
            fix=aside[0].fix if len({problem.fix for problem in aside}) == 1 else "Repair the rows or files above.",
        )
    return Scan(found.samples, tuple(found.set_aside), tuple(found.notices), found.lasting)


def _scan_table(found: _Findings, index: int, options: ResolvedSource, prefix: str) -> None:
    assert options.dataset is not None, "a source has a path or a dataset"
    name, found_before = Path(options.dataset).name, len(found.samples) + len(found.set_aside)
    for number, (where, row, at) in enumerate(rows_of(options)):
        try:
            if isinstance(row, UnusableText):
                raise row
            text = encodable(written(record_of(row, found.pairs)))
        except UnusableText as error:
            found.set_aside.append(Problem(_row(options.dataset, where), error.what, error.fix))
            continue
        place = DatasetRow(options.dataset, options.split, "", number)
        sample = Sample(prefix + where, index, name, place, text, 0, 0, options.repeats, options)
        found.add(sample, _row(options.dataset, where), text, at)
    if len(found.samples) + len(found.set_aside) == found_before:
        what, fix = "This table has no rows.", "Give a table with a row for each text, or remove it."
        raise DataError("dataset-empty", what, where=shown(options.dataset), fix=fix)


def _row(dataset: str, where: str) -> str:
    """The place of a row, for people: "folder/chats.jsonl:3", or "some/dataset train:2"."""
    name = Path(dataset).name
    return shown(f"{dataset}{where.removeprefix(name)}" if where.startswith(f"{name}:") else f"{dataset} {where}")


def _scan_folder(found: _Findings, index: int, options: ResolvedSource, prefix: str) -> None:
    assert options.path is not None, "a source has a path or a dataset"
    folder = walk_texts(
        source_folder(options.path, index),
        recursive=options.recursive,
        include=options.include,
        exclude=options.exclude,
    )
    found.notices += folder.notices
    found.lasting &= folder.lasting
    progress = Progress("sizes", len(folder.relatives), found.report, quiet_s=QUIET_S)
    for relative, real in folder.relatives:
        progress.step()
        path = folder.root / real
        try:
            text = text_in(path)
        except UnicodeDecodeError:
            found.set_aside.append(Problem(shown(path), "It is not UTF-8 text.", "Save it as UTF-8."))
            continue
        except OSError as error:
            found.lasting = False
            what = f"The text cannot be read: {error.strerror}."
            found.set_aside.append(Problem(shown(path), what, "Repair the file or take it away."))
            continue
        if not text.strip():
            found.set_aside.append(Problem(shown(path), "The text is empty.", "Take the file away."))
            continue
        sample = Sample(prefix + relative, index, folder.name, path, text, 0, 0, options.repeats, options)
        found.add(sample, shown(path), written(text))


def text_in(path: Path) -> str:
    """The text of a file (UTF-8, with or without a byte-order mark), with CRLF line ends converted to LF.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read, or is not text (a pipe, gigabytes in size).
    """
    return read_plain(path, MAX_TEXT_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
