"""``datasets`` sources: rows are addressed by index and read one at a time; nothing is decoded here."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import ResolvedSource

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
TEXT_TYPES = ("string", "large_string", "string_view")
ANSWER_TIMEOUT_S = 15.0
SAVED_MARKS = ("state.json", "dataset_dict.json")  # files that save_to_disk writes


@dataclass(frozen=True)
class DatasetRow:
    """The picture of one row of a dataset."""

    dataset: str
    split: str
    column: str
    index: int

    def __str__(self) -> str:
        return f"{self.dataset} [{self.split}] row {self.index}"


def rows_of(source: ResolvedSource) -> Iterator[tuple[DatasetRow, str | None]]:
    """Every row and its caption (None where there is none).

    Raises:
        DataError: no such dataset, split or column, or a column that holds something else.
    """
    assert source.dataset is not None
    table = _open(source.dataset, source.split)
    _check_column(table, source.image_column, "image_column", source.dataset)
    names = [source.image_column]
    if source.caption_column is not None:
        _check_column(table, source.caption_column, "caption_column", source.dataset)
        names.append(source.caption_column)
    captions = table.select_columns(names[1:]) if len(names) > 1 else None
    for index in range(len(table)):
        caption = captions[index][names[1]] if captions is not None else None
        if not isinstance(caption, str | None):
            raise DataError(
                "caption-not-text",
                f"The caption column {names[1]!r} holds {type(caption).__name__}, not text.",
                where=f"{source.dataset} [{source.split}] row {index}",
                fix="Name a column with text in caption_column, or null to go without.",
            )
        yield DatasetRow(source.dataset, source.split, source.image_column, index), caption


def picture_in(row: DatasetRow) -> Path | memoryview | None:
    """Where the row's picture is: a file, or its undecoded bytes (a view, not a copy); None for an empty cell.

    Raises:
        DataError: the column holds no pictures.
    """
    value = _pictures(row.dataset, row.split, row.column)[row.index].column(0)[0]
    if str(value.type).startswith("struct") and value.is_valid:  # {"bytes", "path"}: what an Image feature stores
        fields = [value[name] for name in ("bytes", "path") if name in value]
        value = next((field for field in fields if field.is_valid), None)
    if value is None or not value.is_valid:
        return None
    if str(value.type) in TEXT_TYPES:
        return _resolved(Path(value.as_py()), row.dataset)
    if not hasattr(value, "as_buffer"):
        raise DataError(
            "image-column",
            f"The image column {row.column!r} holds {value.type}, not pictures.",
            where=str(row),
            fix="Name a column of pictures, of their bytes, or of paths in image_column.",
        )
    return memoryview(value.as_buffer()).cast("B")


class _View(io.RawIOBase):
    """Reads from a memoryview without copying the whole of it."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._content)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        chunk = self._content[self._position : self._position + len(buffer)]
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


def as_file(content: memoryview) -> io.BufferedReader:
    """A file object over bytes mapped from disk: of a large picture only the header is read."""
    return io.BufferedReader(_View(content))


def _resolved(path: Path, dataset: str) -> Path:
    """Relative paths are relative to a local dataset's folder."""
    local = Path(os.path.expanduser(dataset))
    folder = local if local.is_dir() else local.parent
    return path if path.is_absolute() or not local.exists() else folder / path


@lru_cache(maxsize=8)
def _open(dataset: str, split: str) -> Any:
    import datasets

    path = Path(os.path.expanduser(dataset))
    where = f"data: dataset {dataset}, split {split}"
    try:
        if os.path.isdir(path) and any((path / mark).is_file() for mark in SAVED_MARKS):
            opened = datasets.load_from_disk(str(path))
            if isinstance(opened, datasets.DatasetDict):
                if split not in opened:
                    raise DataError(
                        "dataset-split",
                        f"The dataset has no split {split!r}.",
                        where=where,
                        fix=f"Splits: {', '.join(sorted(opened))}.",
                    )
                opened = opened[split]
        elif os.path.isfile(path):
            if path.suffix.lower() not in BUILDERS:
                raise DataError(
                    "dataset-kind",
                    f"A dataset cannot be read from a {path.suffix or 'nameless'} file.",
                    where=where,
                    fix=f"Files: {', '.join(BUILDERS)}. For a folder of pictures use path, not dataset.",
                )
            opened = datasets.load_dataset(BUILDERS[path.suffix.lower()], data_files=str(path), split=split)
        elif os.path.isdir(path) or not (path.is_absolute() or path.suffix.lower() in BUILDERS):
            if not os.path.isdir(path):
                _refuse_silent_hub(dataset, where)
            opened = datasets.load_dataset(str(path) if os.path.isdir(path) else dataset, split=split)
        else:
            fix = "Correct the path. Relative paths start where the command runs."
            raise DataError("dataset-missing", f"There is no {path}.", where=where, fix=fix)
    except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            "dataset-unreadable",
            f"The dataset cannot be read: {error}",
            where=where,
            fix="Give a hub id, a Parquet file or folder, or a folder written by save_to_disk, and an existing split.",
        ) from error
    if len(opened) == 0:
        raise DataError("dataset-empty", "The dataset has no rows.", where=where)
    return opened


def _refuse_silent_hub(dataset: str, where: str) -> None:
    """``load_dataset`` waits without end for a hub that takes a question and never answers (datasets 5.2).

    Any other failure is left to it: it looks into its cache.

    Raises:
        DataError: the hub is silent.
    """
    from huggingface_hub import dataset_info
    from huggingface_hub.errors import HTTPError

    started = time.monotonic()
    try:
        dataset_info(dataset, timeout=ANSWER_TIMEOUT_S)
    except (OSError, HTTPError, ValueError) as error:
        if time.monotonic() - started < ANSWER_TIMEOUT_S:
            return
        raise DataError(
            "hub-unreachable",
            "The hub does not answer.",
            where=where,
            fix="Try again later, or set HF_HUB_OFFLINE=1 if the dataset was downloaded before.",
        ) from error


@lru_cache(maxsize=8)
def _pictures(dataset: str, split: str, column: str) -> Any:
    """The picture column as Arrow cells: bytes stay where they are, mapped from disk."""
    return _open(dataset, split).select_columns([column]).with_format("arrow")


def _check_column(table: Any, name: str, key: str, dataset: str) -> None:
    if name not in table.column_names:
        raise DataError(
            "dataset-column",
            f"The dataset has no column {name!r}.",
            where=f"data: dataset {dataset}, {key}: {name}",
            fix=f"Columns: {', '.join(table.column_names)}.",
        )
