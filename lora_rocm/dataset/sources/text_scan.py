"""Finds texts: each ``.txt`` file of a folder and each row of a table is a sample. Unusable texts are skipped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_rocm.dataset.progress import QUIET_S, Progress, Report, ignore
from lora_rocm.dataset.rows.hf_datasets import DatasetRow, was_opened
from lora_rocm.dataset.rows.plain_prompts import is_plain
from lora_rocm.dataset.rows.records import PAIRED, UnusableText, encodable, read, record_of, written
from lora_rocm.dataset.rows.row_cells import RowAccount, RowCells
from lora_rocm.dataset.rows.row_edge import SharedCause, row_edge
from lora_rocm.dataset.rows.row_reference import reference
from lora_rocm.dataset.rows.text_rows import rows_of
from lora_rocm.dataset.sample_table import Sample, Samples
from lora_rocm.dataset.skipped_files import NUM_NAMED
from lora_rocm.dataset.sources.folders import shown, source_folder, table_path, walk_texts
from lora_rocm.dataset.sources.scan import Scan, scan
from lora_rocm.errors import DataError, Problem
from lora_rocm.foundation.bounded_read import read_plain
from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import DataSection, Recipe, ResolvedSource

MAX_TEXT_BYTES = 1 << 24
Parts = Callable[[str], Sequence[str | None]]
"""Function that cuts a text into samples. None in place of a sample means that the function skipped and counted it. It
raises UnusableText if the whole text cannot be used.
"""


NUM_KEPT = 20
"""Number of unusable texts that ``SkippedTexts`` stores."""
ROW_FIX = "Repair or remove it."


def _whole(text: str) -> Sequence[str]:
    return (text,)


@dataclass(frozen=True)
class FoundText:
    """A text of a source.

    Attributes:
        sample: the sample with the text as its caption. A row of a table is a record as one string
            (``records.written``).
        where: the text's file or row, for messages.
        position: position of the row in the table (``text_rows.Row``); None if the sample has to store the text itself.
    """

    sample: Sample
    where: str
    position: int | None = None


@dataclass
class Notes:
    """Notices collected while scanning texts. The fields have the same meaning as in ``Scan``."""

    notices: list[str] = field(default_factory=list)
    lasting: bool = True


@dataclass
class SkippedTexts:
    """Stores the first unusable texts, and counts all of them.

    Attributes:
        most: maximum number of stored texts.
        shared: by error code, the first error that names the chat template or the tokenizer as the cause.
        num_shared: by error code, the number of texts with that error.
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
        """Add a text that raised ``error``. ``where``: the text's file or row."""
        self.add(Problem(where, error.what, error.fix))
        if isinstance(error, SharedCause):
            self.shared.setdefault(error.of_all.code, error.of_all)
            self.num_shared[error.of_all.code] += 1

    @property
    def all_of_them(self) -> DataError:
        """The error to raise if no text is usable. It names the cause that most texts share, or the first texts."""
        for code, number in self.num_shared.most_common(1):
            if 2 * number > self.count:
                return self.shared[code]
        fixes = Counter(problem.fix for problem in self.first)
        return DataError(
            "no-usable-texts",
            f"No text can be used ({count_text(self.count, 'text')} found).",
            where="; ".join(f"{problem.where}: {problem.what}" for problem in self.first[:NUM_NAMED]),
            fix=" ".join(fix for fix, _ in fixes.most_common(NUM_NAMED)),
        )


@dataclass
class TextCount:
    """Numbers of texts in the sources of a recipe.

    Attributes:
        of_source: number of usable texts by index of the source.
        ``aside``: the unusable texts.
        notices: sentences for the user, as in ``Scan.notices``.
        first: the first usable text (``records.read``).
    """

    of_source: Counter[int] = field(default_factory=Counter)
    aside: SkippedTexts = field(default_factory=SkippedTexts)
    notices: Sequence[str] = ()
    first: str = ""


def find_samples(recipe: Recipe, report: Report = ignore, *, copies: bool = True, parts: Parts = _whole) -> Scan:
    """Find the samples of a recipe in a fixed order. The model family determines whether they are texts or images.

    For arguments and errors see ``scan`` and ``scan_texts``.
    """
    if recipe.spec.trains_on_texts:
        return scan_texts(recipe.data, report, parts, pairs=recipe.objective.compares_pairs)
    return scan(recipe.data, report, copies=copies)


def scan_texts(data: DataSection, report: Report = ignore, parts: Parts = _whole, *, pairs: bool = False) -> Scan:
    """Find the texts of all sources, in a fixed order. A text is its sample's caption; width and height are 0.

    Args:
        data: the data section of the recipe.
        report: receives the progress if there are very many texts.
        parts: cuts a text, or a record of a table (``records.written``), into samples.
        pairs: whether a row is a pair of answers.

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
    """Count the texts of all sources. Each text is read once, and only the first stays in memory.

    Raises:
        DataError: see ``scan_texts``.
    """
    return _counted(recipe.data, pairs=recipe.objective.compares_pairs)


def count_table(dataset: str) -> TextCount:
    """Count the texts of a table that no recipe names yet.

    If its first row is a pair of answers, pairs are counted, as in the recipe that ``lora-rocm new`` chooses.

    Raises:
        DataError: see ``scan_texts``.
    """
    data = DataSection.model_validate({"sources": [{"dataset": dataset}]})
    return _counted(data, pairs=begins_with_pair(data.resolved_sources()[0]))


def _counted(data: DataSection, *, pairs: bool) -> TextCount:
    found, notes = TextCount(), Notes()
    for each in texts_of(data, notes, pairs=pairs):
        if isinstance(each, Problem):
            found.aside.add(each)
            continue
        if not found.of_source:
            found.first = each.sample.caption
        found.of_source[each.sample.source] += 1
    if not found.of_source:
        raise found.aside.all_of_them
    found.notices = notes.notices
    return found


def begins_with_pair(source: ResolvedSource) -> bool:
    """Whether the first row of a table is a pair of answers.

    Raises:
        DataError: the table cannot be read.
    """
    row = next((row for _, row, _ in rows_of(source)), None)
    return isinstance(row, Mapping) and row.keys() >= PAIRED


def prompts_are_plain(recipe: Recipe) -> bool | None:
    """Whether the first usable row of every source is a prompt with an answer as plain texts.

    Only files and folders of this machine are read, and datasets of the hub that this process has opened. None means
    that a table is missing, or is on the hub.

    Raises:
        DataError: a table cannot be read.
    """
    pairs = recipe.objective.compares_pairs
    for index, source in enumerate(recipe.data.resolved_sources()):
        if source.dataset is None:
            return False
        if not table_path(source.dataset).exists() and not was_opened(source.dataset, source.split):
            return None
        texts = _of_table(index, source, "", Notes(), pairs)
        first = next((read(each.sample.caption) for each in texts if isinstance(each, FoundText)), "")
        if not is_plain(first):
            return False
    return True


def texts_of(
    data: DataSection, notes: Notes, report: Report = ignore, *, pairs: bool = False
) -> Iterator[FoundText | Problem]:
    """Yield the texts of all sources in a fixed order. A file or row that cannot be used yields a problem.

    Only one text is in memory at a time. ``notes`` is filled during the iteration. For the other arguments see
    ``scan_texts``.

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
    """Cut a text into samples and add them to ``samples``. If there are several, their keys are numbered.

    If ``parts`` refuses the text, it is added to ``skipped`` and the result is False.
    """
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
        what, fix = "This table has no rows.", "Use a table with a row for each text, or remove this table."
        raise DataError("dataset-empty", what, where=shown(options.dataset), fix=fix)
    notes.notices += account.notices(shown(options.dataset))


def _row(dataset: str, where: str) -> str:
    """Return the location of a row for messages: "folder/chats.jsonl:3", or "some/dataset train:2"."""
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
    """Return the text of a file (UTF-8, with or without a byte-order mark), with line ends converted from CRLF to LF.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read, or is not text (a pipe, gigabytes in size).
    """
    return read_plain(path, MAX_TEXT_BYTES).decode("utf-8-sig").replace("\r\n", "\n")
