"""``Sample``, and ``Samples``, which stores a list of samples in an Arrow table."""

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
"""Columns of the table that store text as bytes. The bytes are UTF-8 that may contain lone surrogates, because file
names may have any bytes.
"""
NUMBERS = ("source", "width", "height", "repeats", "row", "frames")
"""Columns of the table that store integers. ``row`` is the row in the dataset, or -1 if the image is a file."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Companion:
    """An image that belongs to a sample, such as its mask.

    name: name of the input that it provides.
    place: the file or cell that contains it. This is the sample's own location if the companion is a channel of the
        image.
    width: width in pixels, after applying EXIF orientation.
    height: height in pixels, after applying EXIF orientation.
    """

    name: str
    place: Path | DatasetRow
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One usable image or text.

    key: unique and stable name that is shown to users (the path relative to the source's folder).
    source: index in ``DataSection.resolved_sources``.
    folder: the folder or dataset under which the exported metadata counts the sample.
    caption: the first caption as it was read, or the fallback. The caption options are not applied yet.
    width, height: size in pixels, after applying EXIF orientation.
    repeats: number of times that an epoch uses the sample.
    given: values that a table of the user specifies for the sample.
    frames: number of frames if the sample is a clip (``dataset.sources.clips``), else 0.
    companions: images that belong to the sample, at most one per name.
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
        """Return the companion with this name; None if there is none."""
        return next((each for each in self.companions if each.name == name), None)

    @property
    def captions(self) -> tuple[str, ...]:
        """All captions of the sample, as they were read. The caption options are not applied yet."""
        return self.caption, *self.given.captions


@cache
def sample_schema() -> Any:
    """Return the Arrow schema of the table of samples."""
    import pyarrow

    texts = [pyarrow.field(name, pyarrow.large_binary()) for name in TEXTS]
    return pyarrow.schema([*texts, *(pyarrow.field(name, pyarrow.int64()) for name in NUMBERS)])


def rows_of(batch: Any) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over the rows of an Arrow record batch, as tuples of Python values."""
    return zip(*(column.to_pylist() for column in batch.columns), strict=True)


class Samples(Lazy[Sample]):
    """A list of samples, stored in an Arrow table. Each ``Sample`` is built on access.

    Args:
        sources: the sources of the recipe.
        batch: an Arrow record batch of samples; None for an empty list.
        resolves: whether captions that are references are read from their files (see ``row_reference``).
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
        """The same samples, but captions that are references stay references. So no file is read."""
        return Samples(self.sources, self.batch, resolves=False)

    def at(self, indices: Any) -> Samples:
        """Return the samples at these indices."""
        import numpy as np

        if np.array_equal(indices, np.arange(len(self))):  # avoids copying a large table
            return self
        rows = np.ascontiguousarray(indices, np.int64)
        return Samples(self.sources, self.batch.take(_numbers(rows)))

    def repeated(self, repeats_N: NDArray[np.int64]) -> Samples:
        """Return the same samples with the number of repeats replaced by ``repeats_N``."""
        import pyarrow

        columns = dict(zip(self.batch.schema.names, self.batch.columns, strict=True))
        columns["repeats"] = _numbers(repeats_N)
        return Samples(self.sources, pyarrow.record_batch([*columns.values()], sample_schema()))

    @property
    def is_reg_N(self) -> NDArray[np.bool_]:
        """Whether each sample is a regularisation image. Shape [N]."""
        import numpy as np

        of_source = np.array([source.is_reg for source in self.sources])
        return of_source[numbers_of(self.batch["source"])]

    @property
    def repeats_N(self) -> NDArray[np.int64]:
        """Number of repeats of each sample. Shape [N]."""
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
        """Yield the paths of image files that rows of datasets refer to, including companions."""
        if any(source.path is None for source in self.sources):
            for sample in self.stored:
                if sample.options.path is None:
                    places = dict.fromkeys((sample.location, *(each.place for each in sample.companions)))
                    yield from (str(place) for place in places if isinstance(place, Path))


def _written(sample: Sample) -> str:
    """Convert a sample's companions to text for ``_read``; "" if there are none.

    A companion in a dataset's cell is stored as its column. If the sample itself is a file that the row names, the row
    is stored too.
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
    for name, width, height, path, column in json.loads(text) if text else ():  # json: a record made in this process
        cell = DatasetRow(options.dataset or "", options.split, column, int(path or row)) if column else None
        found.append(Companion(name, cell or Path(path), width, height))
    return tuple(found)


# pyarrow.array and to_numpy import pandas, which takes a third of a second. So columns are built from buffers and read
# from buffers.


def _texts(values: Sequence[bytes]) -> Any:
    """Return an Arrow column of bytes."""
    import pyarrow

    ends = array("q", itertools.accumulate(map(len, values), initial=0))
    buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(values))]
    return pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(values), buffers)


def _numbers(values: Any) -> Any:
    """Return an Arrow column of 64-bit integers, which shares the memory of ``values``, a buffer of such integers."""
    import pyarrow

    return pyarrow.Array.from_buffers(pyarrow.int64(), len(values), [None, pyarrow.py_buffer(values)])


def numbers_of(column: Any) -> NDArray[np.int64]:
    """Return the values of an Arrow column of signed integers without nulls. Shape [N]."""
    import numpy as np

    width_bytes = column.type.bit_width // 8
    buffer = column.buffers()[1]
    return np.frombuffer(buffer, f"i{width_bytes}", len(column), column.offset * width_bytes).astype(np.int64)


def text_of(value: bytes) -> str:
    """Decode a cell of a column in TEXTS."""
    return value.decode("utf-8", "surrogatepass")
