"""Finds texts: each ``.txt`` file of a folder is a sample, and each row of a table. Unusable texts are skipped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_rocm.dataset.progress import QUIET_S, Progress, Report, ignore
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.dataset.rows.records import UnusableText, encodable, record_of, written
from lora_rocm.dataset.rows.row_cells import RowAccount, RowCells
from lora_rocm.dataset.rows.row_edge import SharedCause, row_edge
from lora_rocm.dataset.rows.row_reference import reference
from lora_rocm.dataset.rows.text_rows import rows_of
from lora_rocm.dataset.sample_table import Sample, Samples
from lora_rocm.dataset.skipped_files import NUM_NAMED
from lora_rocm.dataset.sources.folders import shown, source_folder, walk_texts
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import DataSection, Recipe, ResolvedSource

MAX_TEXT_BYTES = 1 << 24
Parts = Callable[[str], Sequence[str | None]]
"""Cuts a text into samples; None: a skipped sample, which the cutting code counts. Raises UnusableText."""


NUM_KEPT = 20
"""Number of unusable texts that ``SkippedTexts`` keeps."""
ROW_FIX = "Repair or remove it."


def _whole(text: str) -> Sequence[str]:
    return (text,)


@dataclass(frozen=True)
class FoundText:
    """A text of a source.

    Attributes:
        sample: has the text as its caption; a row of a table is a record as one string (``records.written``).
        where: its file or row, for people.
        position: position of its row in the table (``text_rows.Row``); None: the caption itself is kept.
    """

    sample: Sample
    where: str
    position: int | None = None


@dataclass
class Notes:
    """Notices collected while scanning texts: ``Scan.notices`` and ``Scan.lasting``."""

    notices: list[str] = field(default_factory=list)
    lasting: bool = True


@dataclass
class SkippedTexts:
    """The first unusable texts, and their total number.

    Attributes:
        most: maximum number of kept texts.
        shared: code -> the first error that names the chat template or the tokenizer as the cause.
        num_shared: code -> number of texts with that error.
    """

    most: int = NUM_KEPT
    first: list[Problem] = field(default_factory=list)
    last: Problem | None = None
    count: int = 0
    shared: dict[str, DataError] = field(default_factory=dict)
    num_shared: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        self.count, self.last = self.count + 1, problem
        if self.count <= self.most:
            self.first.append(problem)

    def refuse(self, where: str, error: UnusableText) -> None:
        """Add a text that was refused."""
        self.add(Problem(where, error.what, error.fix))
        if isinstance(error, SharedCause):
            self.shared.setdefault(error.of_all.code, error.of_all)
            self.num_shared[error.of_all.code] += 1

    @property
    def all_of_them(self) -> DataError:
        """The error if no text is usable: the shared cause of most texts, or the texts themselves."""
        for code, number in self.num_shared.most_common(1):
            if 2 * number > self.count:
                return self.shared[code]
        fixes = Counter(problem.fix for problem in self.first)
        return DataError(
            "no-usable-texts",
            f"No text can be used (found: {count_text(self.count, 'text')}).",
            where="; ".join(f"{problem.where}: {problem.what}" for problem in self.first[:NUM_NAMED]),
            fix=" ".join(fix for fix, _ in fixes.most_common(NUM_NAMED)),
        )


@dataclass
class TextCount:
    """Number of texts. No text is kept.

    Attributes:
        of_source: number of texts by index of the source.
        ``aside``: the texts that cannot be used.
        notices: as ``Scan.notices``.
    """

    of_source: Counter[int] = field(default_factory=Counter)
    aside: SkippedTexts = field(default_factory=SkippedTexts)
    notices: Sequence[str] = ()


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
    samples, aside, notes = Samples(data.resolved_sources()), SkippedTexts(most=sys.maxsize), Notes()
    for found in texts_of(data, notes, report, pairs=pairs):
        if isinstance(found, Problem):
            aside.add(found)
        else:
            add_parts(samples, found, parts, aside, pairs)
    if not samples:
        raise aside.all_of_them
    return Scan(samples, tuple(aside.first), tuple(notes.notices), notes.lasting)


def count_texts(recipe: Recipe) -> TextCount:
    """Count the texts of every source. Each is read once, and none is kept.

    Raises:
        DataError: as ``scan_texts``.
    """
    found, notes = TextCount(), Notes()
    for each in texts_of(recipe.data, notes, pairs=recipe.objective.compares_pairs):
        if isinstance(each, Problem):
            found.aside.add(each)
        else:
            found.of_source[each.sample.source] += 1
    if not found.of_source:
        raise found.aside.all_of_them
    found.notices = notes.notices
    return found


def texts_of(
    data: DataSection, notes: Notes, report: Report = ignore, *, pairs: bool = False
) -> Iterator[FoundText | Problem]:
    """Every text of every source, in a fixed order, or a problem for a file or row. One is in memory at a time.

    For arguments see ``scan_texts``; ``notes`` is filled during the iteration.

    Raises:
        DataError: a source cannot be read or has no texts.
    """
    sources = data.resolved_sources()
    for index, options in enumerate(sources):  # texts have no resolution, so each is one of the recipe's sources
        prefix = f"sources[{index}]/" if len(sources) > 1 else ""
        if options.path is None:
            yield from _of_table(index, options, prefix, notes, pairs)
        else:
            yield from _of_folder(index, options, prefix, notes, report)


def add_parts(samples: Samples, found: FoundText, parts: Parts, skipped: SkippedTexts, pairs: bool = False) -> bool:
    """Add the samples of a text, numbered if it is cut into several; or skip it and return False."""
    sample, text = found.sample, found.sample.caption
    try:
        with row_edge("The text cannot be used", ROW_FIX):
            cut = parts(text)
    except UnusableText as error:
        skipped.refuse(found.where, error)
        return False
    for number, part in enumerate(cut):
        if part is None:
            continue
        key = sample.key if len(cut) == 1 else f"{sample.key}#{number}"
        at = None if part == text else number
        stored = part if found.position is None else reference(part, found.position, at, pairs)
        samples.append(replace(sample, key=key, caption=stored))
    return True


def _of_table(
    index: int, options: ResolvedSource, prefix: str, notes: Notes, pairs: bool
) -> Iterator[FoundText | Problem]:
    assert options.dataset is not None, "a source has a path or a dataset"
    name, number, account = Path(options.dataset).name, -1, RowAccount()
    for number, (where, row, at) in enumerate(rows_of(options)):
        try:
            if isinstance(row, UnusableText):
                raise row
            with row_edge("The row cannot be read", ROW_FIX):
                cells = RowCells(row)
                text = encodable(written(record_of(cells, pairs)))
        except UnusableText as error:
            yield Problem(_row(options.dataset, where), error.what, error.fix)
            continue
        account.add(cells)
        place = DatasetRow(options.dataset, options.split, "", number)
        sample = Sample(prefix + where, index, name, place, text, 0, 0, options.repeats, options)
        yield FoundText(sample, _row(options.dataset, where), at)
    if number < 0:
        what, fix = "This table has no rows.", "Give a table with a row for each text, or remove this table."
        raise DataError("dataset-empty", what, where=shown(options.dataset), fix=fix)
    notes.notices += account.notices(shown(options.dataset))


def _row(dataset: str, where: str) -> str:
    """The place of a row, for people: "folder/chats.jsonl:3", or "some/dataset train:2"."""
    name = Path(dataset).name
    return shown(f"{dataset}{where.removeprefix(name)}" if where.startswith(f"{name}:") else f"{dataset} {where}")


def _of_folder(
    index: int, options: ResolvedSource, prefix: str, notes: Notes, report: Report
) -> Iterator[FoundText | Problem]:
    assert options.path is not None, "a source has a path or a dataset"
    folder = walk_texts(
        source_folder(options.path, index),
        recursive=options.recursive,
        include=options.include,
        exclude=options.exclude,
        key=options.key,
    )
    notes.notices += folder.notices
    notes.lasting &= folder.lasting
    # Read each text.
    progress = Progress("sizes", len(folder.relatives), report, quiet_s=QUIET_S)
    for relative, real in folder.relatives:
        progress.step()
        path = folder.root / real
        try:
            text = text_in(path)
        except UnicodeDecodeError:
            yield Problem(shown(path), "It is not UTF-8 text.", "Save it as UTF-8.")
            continue
        except OSError as error:
            notes.lasting = False
            what = f"The text cannot be read: {error.strerror}."
            yield Problem(shown(path), what, "Repair or remove the file.")
            continue
        if not text.strip():
            yield Problem(shown(path), "The text is empty.", "Remove the file.")
            continue
        caption = written(text)
        sample = Sample(prefix + relative, index, folder.name, path, caption, 0, 0, options.repeats, options)
        yield FoundText(sample, shown(path))


def text_in(path: Path) -> str:
    """The text of a file (UTF-8, with or without a byte-order mark), with CRLF line ends converted to LF.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read, or is not text (a pipe, gigabytes in size).
    """
    return read_plain(path, MAX_TEXT_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
