"""Reads rows of Hugging Face ``datasets`` sources by index, one at a time. Images are returned without decoding."""

from __future__ import annotations

import glob
import io
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lora_rocm.dataset.images.image_io import (
    MAX_IMAGE_BYTES,
    ImageHeader,
    UnreadableImage,
    read_header,
    readable_extensions,
)
from lora_rocm.dataset.rows.parquet_guard import unpacked_bytes
from lora_rocm.dataset.rows.row_cells import listed
from lora_rocm.dataset.skipped_files import counted, some
from lora_rocm.dataset.sources.file_kinds import companion_match
from lora_rocm.dataset.sources.folders import real_path, shown
from lora_rocm.dataset.sources.given import Given, UnusableValue
from lora_rocm.dataset.sources.metadata_files import MAX_CAPTION_BYTES, METADATA_NAMES, Captions, given_of, names_files
from lora_rocm.errors import DataError
from lora_rocm.recipe.schema import ResolvedSource

BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
TEXT_TYPES = ("string", "large_string", "string_view")
# Builders that only read rows. (The library has others; older datasets include code to execute.)
READ = frozenset({"parquet", "json", "arrow", "csv", "imagefolder", "webdataset"})
ANSWER_TIMEOUT_S = 15.0
# Raised by the library for files that are damaged, of another format, or that include code to execute (RuntimeError).
DATASET_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ImportError,
)
MAX_UNPACKED_BYTES, MAX_UNPACKING = 1 << 30, 50
"""Limits of the unpacked size of a Parquet file, in bytes and as a multiple of the file's size. A file that exceeds
both limits cannot contain images, which hardly compress. The library would write all of it to its cache. (Forged
footers are not detected.)
"""
ADDED = ("__key__", "__url__")  # columns of a webdataset
SAVED_MARKS = ("state.json", "dataset_dict.json")  # files that save_to_disk writes


class UnreadableCell(Exception):
    """A cell that contains no usable image or caption. The message is the reason."""


class EmptyCell(UnreadableCell):
    """A cell without content."""


@dataclass(frozen=True)
class DatasetRow:
    """Address of an image in a dataset: the row, and the column that contains the image."""

    dataset: str
    split: str
    column: str
    index: int

    def __str__(self) -> str:
        return f"{self.dataset} [{self.split}] row {self.index}"


def num_rows(source: ResolvedSource) -> int:
    """Return the number of rows of a source's dataset.

    Raises:
        DataError: there is no such dataset or split.
    """
    assert source.dataset is not None
    return len(opened(source.dataset, source.split))


def rows_of(source: ResolvedSource) -> Iterator[tuple[DatasetRow, Captions | UnreadableCell | None]]:
    """Yield every row with its captions: None if it has no captions, an ``UnreadableCell`` if they cannot be used.

    Raises:
        DataError: there is no such dataset, split or column, or a column is damaged or has the wrong type.
    """
    assert source.dataset is not None
    table = opened(source.dataset, source.split)
    require_column(source, source.image_column, "image_column")
    names = [source.image_column]
    if source.caption_column is not None:
        require_column(source, source.caption_column, "caption_column")
        names.append(source.caption_column)
    captions = table.select_columns(names[1:]).with_format("arrow") if len(names) > 1 else None
    for index in range(len(table)):
        row = DatasetRow(source.dataset, source.split, source.image_column, index)
        try:
            yield row, None if captions is None else _caption(_cell(captions, index), source.caption_column, row)
        except UnreadableCell as error:
            yield row, error


def givens_of(source: ResolvedSource) -> Iterator[Given | UnreadableCell]:
    """Yield each row's loss weight and crop, from the columns that the source names for them.

    An ``UnreadableCell`` replaces values that cannot be used.

    Raises:
        DataError: see ``rows_of``.
    """
    assert source.dataset is not None
    table = opened(source.dataset, source.split)
    given = {"loss_weight_column": source.loss_weight_column, "crop_column": source.crop_column}
    names = {key: name for key, name in given.items() if name is not None}
    for key, name in names.items():
        require_column(source, name, key)
    columns = {key: table.select_columns([name]).with_format("arrow") for key, name in names.items()}
    for index in range(len(table)):
        try:
            cells = {key: _cell(column, index).as_py() for key, column in columns.items()}
            yield given_of(cells.get("loss_weight_column"), cells.get("crop_column"))
        except (UnusableValue, UnreadableCell) as error:
            yield UnreadableCell(str(error))


def notices(source: ResolvedSource) -> list[str]:
    """Return notices about the columns and image files of a dataset that are not read.

    Columns that the library itself adds are ignored.

    Raises:
        DataError: see ``num_rows``.
    """
    assert source.dataset is not None
    read = (source.image_column, source.caption_column, source.loss_weight_column, source.crop_column)
    ours = (*read, *source.control_columns, *ADDED)
    left = [name for name in opened(source.dataset, source.split).column_names if name not in ours]
    said = [f"Columns of {shown(source.dataset)} that are not read: {listed(left)}."] if left else []
    return [*said, *_notify_unlisted(source)]


def _notify_unlisted(source: ResolvedSource) -> list[str]:
    """Return a notice about image files that metadata files do not name, although they name others of that folder.

    Masks and control images with their usual names are ignored.
    """
    assert source.dataset is not None
    root, named = Path(os.path.expanduser(source.dataset)), set[Path]()
    if not os.path.isdir(root):
        return []
    for column in (source.image_column, *source.control_columns):
        for index in range(num_rows(source)):
            with suppress(UnreadableCell):
                image = image_in(DatasetRow(source.dataset, source.split, column, index))
                named |= {image} if isinstance(image, Path) else set()
    there = {
        path
        for folder in {image.parent for image in named if image.is_relative_to(root) and image.parent.is_dir()}
        for path in folder.iterdir()
        if path.suffix.lower() in readable_extensions() and companion_match(path.name) is None
    }
    real = {os.path.realpath(image) for image in named}
    left = sorted(shown(path.name) for path in there if os.path.realpath(path) not in real)
    if not left:
        return []
    count = counted(left, "image is", "images are")
    return [
        f"{count} not used, because no row of {shown(source.dataset)} names it: {some(left)}. "
        "With path in place of dataset, every image of the folder is used."
    ]


def _caption(cell: Any, column: str | None, row: DatasetRow) -> Captions | None:
    if str(cell.type).startswith("dictionary"):
        cell = cell.value
    if not cell.is_valid:
        return None
    if hasattr(cell.type, "value_type") and str(cell.type.value_type) in TEXT_TYPES:  # a list of texts
        if cell.values.nbytes > MAX_CAPTION_BYTES:
            raise UnreadableCell(f"its captions are larger than {MAX_CAPTION_BYTES >> 10} KiB")
        return tuple(_text(each) for each in cell.values if each.is_valid)
    if str(cell.type) not in TEXT_TYPES:
        raise DataError(
            "caption-not-text",
            f"The caption column {column!r} contains {cell.type}, not text.",
            where=str(row),
            fix="Name a column with text in caption_column, or set it to null for no captions.",
        )
    content = cell.as_buffer()
    if content is not None and len(content) > MAX_CAPTION_BYTES:  # checked before it is copied
        raise UnreadableCell(f"its caption is larger than {MAX_CAPTION_BYTES >> 10} KiB")
    return _text(cell)


def _cell(table: Any, index: int) -> Any:
    """Return the cell in a row of a one-column table, as an Arrow scalar.

    Raises:
        UnreadableCell: the row is missing, although the table's length includes it.
    """
    import pyarrow

    try:
        return table[index].column(0)[0]
    except (LookupError, ValueError, pyarrow.ArrowException) as error:
        raise UnreadableCell(f"the dataset is damaged here: {error}") from error


def header_in(row: DatasetRow) -> tuple[ImageHeader, Path | DatasetRow]:
    """Read the header of the image in a cell.

    Returns:
        The header, and the location of the image: the file if the cell contains a path, else ``row``.

    Raises:
        DataError: see ``image_in``.
        EmptyCell, UnreadableCell, UnreadableImage: the cell has no usable image.
    """
    image = image_in(row)
    if image is None:
        raise EmptyCell("the cell is empty")
    if isinstance(image, Path):
        return read_header(image), image
    if image.nbytes > MAX_IMAGE_BYTES:
        raise UnreadableImage(f"it is larger than {MAX_IMAGE_BYTES >> 20} MiB")
    return read_header(as_file(image)), row


def image_in(row: DatasetRow) -> Path | memoryview | None:
    """Return a row's image as a file path or as undecoded bytes (a view, not a copy); None for an empty cell.

    Relative paths start in the folder of a local dataset. Paths out of this folder are only accepted from lists of
    files that users write (a JSON file, a column of texts). A hub dataset may only contain paths into the library's
    caches.

    Raises:
        DataError: the column does not contain images.
        UnreadableCell: the cell contains a path that is not accepted.
    """
    value = _cell(_images(row.dataset, row.split, row.column), row.index)
    listed = True
    if str(value.type).startswith("struct") and value.is_valid:  # {"bytes", "path"}, as stored by an Image feature
        listed = False
        fields = [value[name] for name in ("bytes", "path") if name in value]
        value = next((field for field in fields if field.is_valid), None)
    if value is None or not value.is_valid:
        return None
    if str(value.type) in TEXT_TYPES:
        text = _text(value)
        return _resolved(text, row.dataset, listed) if text.strip() else None
    if not hasattr(value, "as_buffer"):
        raise DataError(
            "image-column",
            f"The column {row.column!r} contains {value.type}, not images.",
            where=str(row),
            fix="Name a column of images, of their bytes, or of paths.",
        )
    return memoryview(value.as_buffer()).cast("B") if value.as_buffer().size else None


class _View(io.RawIOBase):
    """A raw file over a memoryview. Only the bytes that are read are copied."""

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
    """Return a file object over memory-mapped bytes. Reading a header from it does not load the whole image."""
    return io.BufferedReader(_View(content))


def leads_out(path: Path, dataset: str) -> bool:
    """Whether an image of a local dataset is outside the dataset's folder, after links are resolved."""
    return not _lies_in(path, _folder(dataset))


def _resolved(text: str, dataset: str, listed: bool) -> Path:
    """Return the file that a cell's text refers to. Relative paths start in a local dataset's folder.

    Args:
        text: the text of the cell.
        dataset: path or hub id of the dataset.
        listed: whether a user wrote the text into a list of files. Otherwise the library stored it with an image.

    Raises:
        UnreadableCell: see ``image_in``.
    """
    if text.startswith(("//", "\\\\")) or "\0" in text:  # Windows would sign in to any host in a UNC path
        raise UnreadableCell(f"the cell names a path that is not a file on this machine: {shown(text):.200}")
    local = Path(os.path.expanduser(dataset))
    if os.path.exists(local):
        path = _folder(dataset) / text  # an absolute path stays unchanged
        allowed = listed or not leads_out(path, dataset)
    else:
        path = Path(text)
        allowed = any(_lies_in(path, Path(cache)) for cache in _library_caches())
    if not allowed:
        raise UnreadableCell(f"the cell names a file outside the dataset: {shown(text):.200}")
    return path


def _folder(dataset: str) -> Path:
    local = Path(os.path.expanduser(dataset))
    return local if os.path.isdir(local) else local.parent


def _lies_in(path: Path, folder: Path) -> bool:
    real, real_folder = real_path(path), real_path(folder)
    return real is not None and real_folder is not None and Path(real).is_relative_to(real_folder)


def _library_caches() -> tuple[str, str]:
    """Return the two folders in which the library stores downloaded datasets."""
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(datasets.config.HF_DATASETS_CACHE), HF_HUB_CACHE


def _text(cell: Any) -> str:
    try:
        return str(cell.as_py())
    except UnicodeDecodeError:
        raise UnreadableCell("it is not UTF-8 text") from None


_opened_before = set[tuple[str, str]]()


@lru_cache(maxsize=8)
def opened(dataset: str, split: str) -> Any:
    """Return a split of a dataset, from disk or from the hub, as an object of the ``datasets`` library.

    Raises:
        DataError: the dataset is missing, empty, unreadable, or in an unsupported format.
    """
    import datasets

    datasets.disable_progress_bars()  # they would also appear in logs, and we report progress ourselves
    path = Path(os.path.expanduser(dataset))
    where = f"data: dataset {dataset}, split {split}"
    try:
        # A folder written by save_to_disk.
        if os.path.isdir(path) and any(os.path.isfile(path / mark) for mark in SAVED_MARKS):
            found = datasets.load_from_disk(str(path))
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise DataError(
                        "dataset-split",
                        f"The dataset has no split {split!r}.",
                        where=where,
                        fix=f"Splits: {', '.join(sorted(found))}.",
                    )
                found = found[split]
        # A single Parquet or JSON file.
        elif os.path.isfile(path):
            if path.suffix.lower() not in BUILDERS:
                raise DataError(
                    "dataset-kind",
                    f"This file type cannot be read as a dataset: {path.suffix or 'no extension'}.",
                    where=where,
                    fix=f"Supported files: {', '.join(BUILDERS)}. For a folder of images, use path instead.",
                )
            _check_parquet([path], where)
            found = datasets.load_dataset(BUILDERS[path.suffix.lower()], data_files=glob.escape(str(path)), split=split)
        # Another folder, or an id on the hub.
        elif os.path.isdir(path) or not (path.is_absolute() or path.suffix.lower() in BUILDERS):
            if not os.path.isdir(path):
                _refuse_silent_hub(dataset, where)
            found = _from_folder(path, split, where) if os.path.isdir(path) else _from_hub(dataset, split, where)
        else:
            fix = "Correct the path. Relative paths start where the command runs."
            raise DataError("dataset-missing", f"There is no file or folder {path}.", where=where, fix=fix)
    except (*DATASET_ERRORS, datasets.exceptions.DatasetsError) as error:  # DatasetsError only points to its cause
        raise DataError(
            "dataset-unreadable",
            f"The dataset cannot be read: {shown(error.__cause__ or error):.400}",
            where=where,
            fix="Use a hub id, a Parquet file or folder, or a folder written by save_to_disk, and an existing split.",
        ) from error
    if len(found) == 0:
        fix = "Use a split that has rows, or a different dataset."
        raise DataError("dataset-empty", "The dataset has no rows.", where=where, fix=fix)
    _opened_before.add((dataset, split))
    return found


def was_opened(dataset: str, split: str) -> bool:
    """Whether this process has opened a dataset, so that its rows can be read without the network."""
    return (dataset, split) in _opened_before


def _from_folder(path: Path, split: str, where: str) -> Any:
    """Load a folder of Parquet or JSON files, or of images with metadata files. File names determine the splits.

    The library gets an explicit list of files. Otherwise it would follow a README.md in the folder, which may name
    files anywhere, even on the network.

    Raises:
        DataError: the folder contains no dataset, or a Parquet file is too large when unpacked.
    """
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = glob.escape(path.resolve().as_posix())
    kinds = [("imagefolder", METADATA_NAMES), *((builder, (f"*{suffix}",)) for suffix, builder in BUILDERS.items())]
    for builder, wanted in kinds:
        there = [file for pattern in wanted for file in path.rglob(pattern)]
        if not there or (builder == "imagefolder" and not any(map(names_files, there))):
            continue
        # List the files of each split by the library's naming patterns, limited to this builder's files.
        suffixes = [Path(pattern).suffix for pattern in wanted]
        found = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base, allowed_extensions=suffixes)
        files = {
            str(name): [file for file in paths if any(Path(file).match(pattern) for pattern in wanted)]
            for name, paths in found.items()
        }
        _check_parquet((Path(file) for paths in files.values() for file in paths), where)
        escaped = {name: [glob.escape(file) for file in paths] for name, paths in files.items() if paths}
        return datasets.load_dataset(builder, data_files=escaped, split=split)
    raise DataError(
        "dataset-kind",
        "There is no dataset in this folder.",
        where=where,
        fix=f"Supported are {', '.join(BUILDERS)} files, images with a metadata file, and folders of save_to_disk. For "
        "a folder of images or .txt files, use path instead.",
    )


def _check_parquet(files: Iterable[Path], where: str) -> None:
    """Check the rows and the unpacked size of Parquet files before the library unpacks any file.

    Raises:
        DataError: a file has no rows, has two columns of the same name, or exceeds both MAX_UNPACKED_BYTES and
            MAX_UNPACKING.
        OSError, pyarrow.ArrowException (a ValueError or OSError): a file cannot be read, or is not Parquet.
    """
    from pyarrow import parquet

    for file in files:
        if file.suffix.lower() != ".parquet":
            continue
        if parquet.read_metadata(file).num_rows == 0:  # the library fails at such a file with an unclear message
            what, fix = "This Parquet file has no rows.", "Remove the file, or replace it by one with rows."
            raise DataError("dataset-empty", what, where=f"{where}: {shown(file)}", fix=fix)
        if twice := _repeated_name(parquet.read_schema(file)):  # as a dict, a row would keep only the last
            what, fix = f"Two columns or fields have the name {shown(twice):.60}.", "Rename or remove one."
            raise DataError("dataset-column", what, where=f"{where}: {shown(file)}", fix=fix)
        limit_bytes = max(MAX_UNPACKED_BYTES, MAX_UNPACKING * file.stat().st_size)
        found_bytes = unpacked_bytes(file, limit_bytes, MAX_UNPACKING)
        if found_bytes > limit_bytes:
            raise DataError(
                "dataset-swells",
                f"{file.stat().st_size} bytes would unpack to {found_bytes} bytes or more, too many for images.",
                where=f"{where}: {shown(file)}",
                fix="Rebuild the dataset, with images in their own format (PNG, JPEG, ...) in its cells.",
            )


def _repeated_name(fields: Iterable[Any]) -> str:
    """Return a name that two columns share, or two fields of a struct at any depth; "" if all names are unique."""
    found = list(fields)
    names = Counter(field.name for field in found)
    inner = ([kind.field(n) for n in range(kind.num_fields)] for kind in (field.type for field in found))
    return next((name for name, count in names.items() if count > 1), "") or next(
        filter(None, map(_repeated_name, inner)), ""
    )


def _from_hub(dataset: str, split: str, where: str) -> Any:
    import datasets

    builder = datasets.load_dataset_builder(dataset)
    if builder.name not in READ:
        raise DataError(
            "dataset-kind",
            f"A dataset of the kind {shown(builder.name)} is not supported.",
            where=where,
            fix=f"Supported kinds: {', '.join(sorted(READ))}.",
        )
    return datasets.load_dataset(dataset, split=split)


def _refuse_silent_hub(dataset: str, where: str) -> None:
    """Check that the hub answers.

    ``load_dataset`` waits forever if the hub accepts a request but never responds (datasets 5.2). Other failures are
    ignored here, because ``load_dataset`` handles them by using its cache.

    Raises:
        DataError: the hub does not answer within ANSWER_TIMEOUT_S.
    """
    from huggingface_hub import dataset_info
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever library it uses

    started = time.monotonic()
    try:
        dataset_info(dataset, timeout=ANSWER_TIMEOUT_S)
    except (OSError, HTTPError, ValueError) as error:
        if time.monotonic() - started < ANSWER_TIMEOUT_S:
            return
        raise DataError(
            "hub-unreachable",
            "The Hugging Face Hub does not answer.",
            where=where,
            fix="Try again later, or set HF_HUB_OFFLINE=1 if the dataset was downloaded before.",
        ) from error


@lru_cache(maxsize=8)
def _images(dataset: str, split: str, column: str) -> Any:
    """Return the image column in Arrow format. Its bytes stay memory-mapped."""
    return opened(dataset, split).select_columns([column]).with_format("arrow")


def require_column(source: ResolvedSource, name: str, key: str) -> None:
    """Raise DataError if a dataset lacks a column, or if the column is damaged.

    Args:
        source: the source with the dataset.
        name: name of the column.
        key: recipe key that names the column, for the message.
    """
    import pyarrow

    dataset = source.dataset or ""
    table = opened(dataset, source.split)
    if name not in table.column_names:
        raise DataError(
            "dataset-column",
            f"The dataset has no column {name!r}.",
            where=f"data: dataset {dataset}, {key}: {name}",
            fix=f"Use one of these columns: {shown(', '.join(table.column_names)):.400}.",
        )
    try:  # Arrow trusts a file's lengths and offsets unless validated: a wrong one reads arbitrary memory
        table.data.column(name).validate(full=True)
    except (ValueError, pyarrow.ArrowException) as error:
        where, fix = f"data: dataset {dataset}, {key}: {name}", "Download or rebuild the dataset."
        raise DataError("dataset-damaged", f"A column is damaged: {shown(error):.400}", where=where, fix=fix) from error
