"""``Sample``, and ``Samples``: a list of samples in an Arrow table."""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.rows.hf_datasets import DatasetRow
from lora_rocm.dataset.rows.row_reference import resolved
from lora_rocm.dataset.sources.given import Given
from lora_rocm.recipe.schema import ResolvedSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEXTS = ("key", "place", "caption", "folder", "given", "companions")
"""Columns of bytes: UTF-8 that may contain lone surrogates, because file names may have any bytes."""
NUMBERS = ("source", "width", "height", "repeats", "row", "frames")
"""``row``: row of the dataset; -1 if the image is the file at ``place``."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Companion:
    """An image that belongs to a sample, such as its mask.

    name: the input that it provides. place: its place; the sample's place, if it is a part of the sample's own image.
    width, height: the companion's size in pixels, after EXIF orientation.
    """

    name: str
    place: Path | DatasetRow
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One usable image or text.

    key: unique and stable, shown to users (the path relative to the source's folder).
    source: index in ``DataSection.resolved_sources``.
    folder: the folder or dataset under which the metadata counts it.
    caption: as read, or the fallback; caption options are not yet applied.
    width, height: in pixels, after EXIF orientation.
    repeats: number of times it is used per epoch.
    given: the values of a table for it.
    frames: number of frames of a clip, which is a folder (``dataset.sources.clips``); else 0.
    companions: the images that belong to it, at most one per name.
    """

    key: str
    source: int
    folder: str
    location: Path | DatasetRow
    caption: str
    width: int
    height: int
    repeats: int
    options: ResolvedSource
    given: Given = Given()
    frames: int = 0
    companions: tuple[Companion, ...] = ()

    def companion(self, name: str) -> Companion | None:
        """The companion of this name; None if there is none."""
        return next((each for each in self.companions if each.name == name), None)

    @property
    def captions(self) -> tuple[str, ...]:
        """All its captions, as ``caption``."""
        return self.caption, *self.given.captions


@cache
def sample_schema() -> Any:
    """The Arrow schema of samples."""
    import pyarrow

    texts = [pyarrow.field(name, pyarrow.large_binary()) for name in TEXTS]
    return pyarrow.schema([*texts, *(pyarrow.field(name, pyarrow.int64()) for name in NUMBERS)])


def rows_of(batch: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of an Arrow record batch."""
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


class Samples(Lazy[Sample]):
    """A list of samples in an Arrow table; builds each ``Sample`` on access.

    Args:
        sources: the sources of the recipe.
        batch: an Arrow record batch of samples; None for an empty list.
        resolves: read the texts that the table only refers to (``row_reference``).
    """

    def __init__(self, sources: Sequence[ResolvedSource], batch: Any = None, resolves: bool = True) -> None:
        self.sources, self.resolves = sources, resolves
        self._batches, self._new = ([] if batch is None else [batch]), list[tuple[Any, ...]]()
        self._length = sum(map(len, self._batches))

    def append(self, sample: Sample) -> None:
        location, row = (sample.location, -1) if isinstance(sample.location, Path) else ("", sample.location.index)
        texts = (sample.key, str(location), sample.caption, sample.folder, sample.given.text, _written(sample))
        numbers = (sample.source, sample.width, sample.height, sample.repeats, row, sample.frames)
        self._new.append((*(text.encode("utf-8", "surrogatepass") for text in texts), *numbers))
        self._length += 1
        if len(self._new) == ROWS_AT_ONCE:
            self._take_new()

    def _take_new(self) -> None:
        import pyarrow

        columns = [
            _texts(column) if at < len(TEXTS) else _numbers(array("q", column))
            for at, column in enumerate(zip(*self._new, strict=True))
        ]
        self._batches.append(pyarrow.record_batch(columns, sample_schema()))
        self._new.clear()

    @property
    def batch(self) -> Any:
        """All samples as one Arrow record batch."""
        import pyarrow

        if self._new:
            self._take_new()
        if len(self._batches) != 1:
            none = [*(_texts(()) for _ in TEXTS), *(_numbers(b"") for _ in NUMBERS)]
            self._batches = [pyarrow.concat_batches([pyarrow.record_batch(none, sample_schema()), *self._batches])]
        return self._batches[0]

    @property
    def stored(self) -> Samples:
        """The same samples, with the captions as they are in the table: no file is read."""
        return Samples(self.sources, self.batch, resolves=False)

    def at(self, indices: Any) -> Samples:
        """The samples at these indices."""
        import numpy as np

        if np.array_equal(indices, np.arange(len(self))):  # avoids copying a large table
            return self
        rows = np.ascontiguousarray(indices, np.int64)
        return Samples(self.sources, self.batch.take(_numbers(rows)))

    def repeated(self, repeats_N: NDArray[np.int64]) -> Samples:
        """The same samples with other repeats."""
        import pyarrow

        columns = dict(zip(self.batch.schema.names, self.batch.columns, strict=True))
        columns["repeats"] = _numbers(repeats_N)
        return Samples(self.sources, pyarrow.record_batch([*columns.values()], sample_schema()))

    @property
    def is_reg_N(self) -> NDArray[np.bool_]:
        """Flags of the samples that are regularisation images."""
        import numpy as np

        of_source = np.array([source.is_reg for source in self.sources])
        return of_source[numbers_of(self.batch["source"])]

    @property
    def repeats_N(self) -> NDArray[np.int64]:
        """The repeats of each sample."""
        return numbers_of(self.batch["repeats"])

    def __len__(self) -> int:
        return self._length

    def _made(self, start: int, stop: int) -> Sequence[Sample]:
        return [self._sample(*row) for row in rows_of(self.batch.slice(start, stop - start))]

    def _sample(
        self, key: bytes, place: bytes, caption: bytes, folder: bytes, given: bytes, companions: bytes,
        source: int, width: int, height: int, repeats: int, row: int, frames: int,
    ) -> Sample:  # fmt: skip
        options = self.sources[source]
        location: Path | DatasetRow = Path(text_of(place))
        if row >= 0:
            location = DatasetRow(options.dataset or "", options.split, options.image_column, row)
        text = text_of(caption)
        if self.resolves and row >= 0 and not width:
            text = resolved(text, options)
        return Sample(
            text_of(key), source, text_of(folder), location, text, width, height, repeats, options,
            Given.of_text(text_of(given)), frames, _read(text_of(companions), options, row),
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return id(self)

    def files_of_datasets(self) -> Iterator[str]:
        """Paths of the image files that dataset sources refer to, including companions."""
        if any(source.path is None for source in self.sources):
            for sample in self.stored:
                if sample.options.path is None:
                    places = dict.fromkeys((sample.location, *(each.place for each in sample.companions)))
                    yield from (str(place) for place in places if isinstance(place, Path))


def _written(sample: Sample) -> str:
    """The companions of a sample as text for ``_read``; empty if there are none.

    A cell is stored as its column; its row is stored too if the sample itself is a file that the row names.
    """
    places, is_file = [each.place for each in sample.companions], isinstance(sample.location, Path)
    named = [
        [str(place), ""] if isinstance(place, Path) else [str(place.index) if is_file else "", place.column]
        for place in places
    ]
    sizes = [[each.name, each.width, each.height] for each in sample.companions]
    return json.dumps([size + place for size, place in zip(sizes, named, strict=True)]) if places else ""


def _read(text: str, options: ResolvedSource, row: int) -> tuple[Companion, ...]:
    found = []
    for name, width, height, path, column in json.loads(text) if text else ():
        cell = DatasetRow(options.dataset or "", options.split, column, int(path or row)) if column else None
        found.append(Companion(name, cell or Path(path), width, height))
    return tuple(found)


# pyarrow.array and to_numpy import pandas, which takes a third of a second. So columns are built from buffers and read
# from buffers.


def _texts(values: Sequence[bytes]) -> Any:
    """A column of bytes."""
    import pyarrow

    ends = array("q", itertools.accumulate(map(len, values), initial=0))
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(values))]
    return pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(values), buffers)


def _numbers(values: Any) -> Any:
    """A column of 64-bit integers, from a buffer of such integers."""
    import pyarrow

    return pyarrow.Array.from_buffers(pyarrow.int64(), len(values), [None, pyarrow.py_buffer(values)])


def numbers_of(column: Any) -> NDArray[np.int64]:
    """The values of a column of signed integers without gaps."""
    import numpy as np

    width_bytes = column.type.bit_width // 8
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, f"i{width_bytes}", len(column), column.offset * width_bytes).astype(np.int64)


def text_of(value: bytes) -> str:
    """Decode a cell of a column in TEXTS."""
    return value.decode("utf-8", "surrogatepass")
