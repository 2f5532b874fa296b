"""The samples of a run as an Arrow table with their axes, crops and cache keys, and the plan's items, built from it.

A sample takes some 300 bytes in addition to its name and caption. As objects it would take several thousand.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import compute

from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.images.views import ImageView, view_geometry, views_of
from lora_rocm.dataset.order.batch_plan import Grid, Item, Outline, TextLengths
from lora_rocm.dataset.sample_table import Sample, Samples, numbers_of, rows_of, sample_schema, text_of
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest, LookupResult, VideoWanted

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import EntrySpec
    from lora_rocm.recipe.schema import ResolvedSource

HASH_BYTES, KEY_BYTES, LENGTH_BYTES = 32, 20, 4
MIN_VIEWS = 2  # an image and its mirror image
LENGTH_TYPE = f"<u{LENGTH_BYTES}"
AXES = ("h", "w", "frames", "tokens")
"""The axes that a sample can have. The column "axis h" has the length along h, or 0 if the sample has no such axis.

An entry that keeps the size of a companion adds two axes (``axes_of``).
"""
AXIS = "axis "
SHARE = "share"  # column: ``Item.share``
CUT = "cut"  # column of image entries: (height, width) of the scaled image, and (top, left) of the crop of h x w
CUT_NUMBERS = 4
Rows: TypeAlias = NDArray[Any]
"""A column of N rows, with one number or several bytes per row."""
ANY_SHAPE = SampleShape.of(samples=1)
"""Shape of samples that have no size: they are all in one bucket."""


def _shape(lengths: Mapping[str, int]) -> SampleShape:
    """Return the shape of a sample with these lengths, keyed by axis; ANY_SHAPE if all lengths are 0."""
    axes = {axis: length for axis, length in lengths.items() if length}
    return SampleShape.of(**axes) if axes else ANY_SHAPE


def axes_of(entries: Iterable[EntrySpec]) -> list[str]:
    """Return the names of all axes in a table with these entries."""
    return [*AXES, *(f"{entry.name}_{side}" for entry in entries if entry.keeps_size for side in "hw")]


def _lengths(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths in one table row, keyed by axis."""
    return {name.removeprefix(AXIS): int(length) for name, length in row.items() if name.startswith(AXIS)}


def slot_bytes(sources: Iterable[ResolvedSource]) -> int:
    """Return the size of the keys of all views of one image, in the source with the most views."""
    return KEY_BYTES * max(MIN_VIEWS, *(len(views_of(source)) for source in sources))


def table_schema(entries: Iterable[EntrySpec], size: int) -> Any:
    """Return the table's Arrow schema: columns of samples, axes, crop and image hash, and then the keys of entries.

    The crop column exists if an entry is encoded from an image. Column "key" of an entry that is encoded from captions
    has its keys concatenated: per view, the caption variants and then the empty caption. For an entry encoded from the
    image alone it has a fixed ``size`` in bytes (``slot_bytes``), and column "whole" has the keys of the untiled
    entries. For an entry with a ``caption_mask``, column "length" has the mask's size in bytes for each key.
    """
    entries = list(entries)
    fields = [pyarrow.field(name, pyarrow.int32()) for name in (*(AXIS + axis for axis in axes_of(entries)), SHARE)]
    if any(entry.has_views for entry in entries):
        fields.append(pyarrow.field(CUT, pyarrow.binary(CUT_NUMBERS * np.int32().itemsize)))
    fields.append(pyarrow.field("sha256", pyarrow.binary(HASH_BYTES)))
    for entry in entries:
        kind = pyarrow.large_binary() if entry.has_captions else pyarrow.binary(size)
        fields.append(pyarrow.field(f"key {entry.name}", kind))
        if not entry.has_captions:
            fields.append(pyarrow.field(f"whole {entry.name}", kind))
        if entry.caption_mask:
            fields.append(pyarrow.field(f"length {entry.name}", kind))
    return pyarrow.schema([*sample_schema(), *fields])


def check_table(batch: Any, entries: Iterable[EntrySpec], sources: Sequence[ResolvedSource]) -> None:
    """Validate a table read from a file, including its references to sources and its lists of keys.

    Raises:
        ValueError, pyarrow.ArrowException: the table is damaged, or has other entries.
    """
    batch.validate(full=True)
    if batch.schema != table_schema(entries, slot_bytes(sources)) or any(column.null_count for column in batch.columns):
        raise ValueError("the table does not have the expected columns")
    if not (0 <= compute.min(batch["source"]).as_py() and compute.max(batch["source"]).as_py() < len(sources)):
        raise ValueError("a row refers to a source that does not exist")
    for entry in entries:
        sizes = numbers_of(compute.binary_length(batch[f"key {entry.name}"]))
        if (sizes < 2 * KEY_BYTES).any() or (sizes % KEY_BYTES).any():
            raise ValueError("a list of keys has an invalid size")
        if entry.caption_mask and (lengths_in(batch[f"length {entry.name}"])[0] * KEY_BYTES != sizes).any():
            raise ValueError("the numbers of keys and lengths differ")


def entry_keys(batch: Any, entries: Iterable[EntrySpec]) -> dict[str, bytes]:
    """Return the keys of all entries in a table, KEY_BYTES each, concatenated per kind of entry."""
    keys = {}
    for entry in entries:
        keys_NK = np.frombuffer(b"".join(batch[f"key {entry.name}"].to_pylist()), np.uint8).reshape(-1, KEY_BYTES)
        keys[entry.name] = keys_NK[keys_NK.any(axis=1)].tobytes()
    return keys


class KeyLists:
    """Builds a table column with a list of cache keys, or a list of lengths, in each row."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])

    def append(self, keys: Iterable[str]) -> None:
        self._bytes += b"".join(map(bytes.fromhex, keys))
        self._ends.append(len(self._bytes))

    def append_lengths(self, lengths: Iterable[int]) -> None:
        self._bytes += b"".join(length.to_bytes(LENGTH_BYTES, "little") for length in lengths)
        self._ends.append(len(self._bytes))

    @property
    def column(self) -> Any:
        """The finished column, as an Arrow array of bytes."""
        buffers = [None, pyarrow.py_buffer(self._ends), pyarrow.py_buffer(self._bytes)]
        return pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(self._ends) - 1, buffers)


class UsableSamples(Lazy[EncodeRequest]):
    """The usable samples, with their axes, crops, image hashes and the cache keys found so far.

    Args:
        samples: the samples (N).
        rows: the other columns of the table by name. Axes and SHARE are int32 [N]. CUT is int32 [N, 4], and exists if
            images are read. The image hashes (zeros if unknown) and the keys of entries encoded from the image alone
            are bytes.
    """

    def __init__(self, samples: Samples, rows: Mapping[str, Rows]) -> None:
        self.samples, self._rows = samples, rows
        self._num_found_N = np.zeros(len(samples), np.uint8)

    @classmethod
    def unfilled(
        cls, samples: Samples, entries: Iterable[str] = (), axes: Mapping[str, Rows] | None = None
    ) -> UsableSamples:
        """Return samples without keys or hashes.

        Args:
            samples: the samples (N).
            entries: names of the entries that are encoded from the image alone.
            axes: columns of the axes that are already known, and CUT if images are read.
        """
        count, size = len(samples), slot_bytes(samples.sources)
        rows: dict[str, Rows] = {AXIS + axis: np.zeros(count, np.int32) for axis in AXES}
        rows[f"{AXIS}frames"] = numbers_of(samples.batch["frames"]).astype(np.int32)
        rows |= {SHARE: np.ones(count, np.int32), **(axes or {})}
        rows["sha256"] = np.zeros((count, HASH_BYTES), np.uint8)
        rows |= {f"{kind} {name}": np.zeros((count, size), np.uint8) for name in entries for kind in ("key", "whole")}
        return cls(samples, rows)

    @classmethod
    def of_table(cls, batch: Any, sources: Sequence[ResolvedSource]) -> UsableSamples:
        """Return the samples of a table, without their keys. This is enough to encode entries again."""
        names = [name for name in batch.schema.names if name.startswith(AXIS)]
        rows: dict[str, Rows] = {name: numbers_of(batch[name]) for name in (*names, SHARE)}
        if CUT in batch.schema.names:
            rows[CUT] = byte_rows(batch[CUT]).view(np.int32)
        return cls(samples_in(batch, sources), {**rows, "sha256": byte_rows(batch["sha256"])})

    def table(self, entries: Iterable[EntrySpec], captions: Mapping[str, KeyLists]) -> Any:
        """Return the table as an Arrow record batch with ``table_schema``.

        ``captions``: keys and lengths of the entries that are encoded from captions, by column name.
        """
        columns = {name: lists.column for name, lists in captions.items()}
        of_samples, schema = self.samples.batch, table_schema(entries, slot_bytes(self.samples.sources))
        for name, rows in self._rows.items():
            if name in schema.names:
                buffer = pyarrow.py_buffer(np.ascontiguousarray(rows))
                columns[name] = pyarrow.Array.from_buffers(schema.field(name).type, len(rows), [None, buffer])
        rest = [columns[name] for name in schema.names[of_samples.num_columns :]]
        return pyarrow.record_batch([*of_samples.columns, *rest], schema)

    def ordered(self, indices: NDArray[np.int64]) -> UsableSamples:
        """Return the samples at these indices, in this order."""
        return UsableSamples(self.samples.at(indices), {name: rows[indices] for name, rows in self._rows.items()})

    def repeated(self, repeats_N: NDArray[np.int64]) -> UsableSamples:
        """Return the same samples with these numbers of repeats."""
        return UsableSamples(self.samples.repeated(repeats_N), self._rows)

    def __len__(self) -> int:
        return len(self.samples)

    def _made(self, start: int, stop: int) -> Sequence[EncodeRequest]:
        return [self._wanted(index, sample) for index, sample in enumerate(self.samples[start:stop], start)]

    def _wanted(self, index: int, sample: Sample) -> EncodeRequest:
        row = {name: self._rows[name][index] for name in (f"{AXIS}h", f"{AXIS}w", CUT)}
        kind = VideoWanted if sample.frames else EncodeRequest
        return kind(sample, _geometry(sample, row), views_of(sample.options), self.sha256(index))

    def found(self, index: int, entry: str, lookup: LookupResult) -> None:
        """Record a sample's hash and its keys for one kind of entry, once the entries are in the cache."""
        self.hashed(index, lookup.sha256)
        for number, made in enumerate(lookup.entries):
            part = slice(number * KEY_BYTES, (number + 1) * KEY_BYTES)
            for kind, key in (("key", made.key), ("whole", made.whole_key)):
                self._rows[f"{kind} {entry}"][index, part] = bytearray.fromhex(key)
        self._num_found_N[index] += 1

    def hashed(self, index: int, sha256: str) -> None:
        """Record the hash of a sample's image file."""
        self._rows["sha256"][index] = bytearray.fromhex(sha256)

    def counted(self, index: int, num_tokens: int, share: int) -> None:
        """Record a text's number of tokens, and its share of an update's loss (stored as at least 1)."""
        self._rows[f"{AXIS}tokens"][index], self._rows[SHARE][index] = num_tokens, max(share, 1)

    def sha256(self, index: int) -> str:
        """Return the hash of a sample's image file in hexadecimal, or "" if it is unknown."""
        sha256 = self._rows["sha256"][index].tobytes()
        return sha256.hex() if any(sha256) else ""

    @property
    def ready(self) -> NDArray[np.int64]:
        """Sorted indices of the samples that have all their image entries in the cache."""
        num_entries = sum(name.startswith("key ") for name in self._rows)
        return np.flatnonzero(self._num_found_N == num_entries)

    def shape(self, index: int) -> SampleShape:
        """Return the shape of a sample."""
        return _shape(_lengths({name: rows[index] for name, rows in self._rows.items() if name.startswith(AXIS)}))


class Items(Lazy[Item]):
    """The items of a plan, built from table rows on access.

    Args:
        batch: rows of the table.
        sources: sources of the recipe.
        entries: specifications of all entries that an item has.
        held_out: whether the items are for the validation loss, without mirroring, repeats or caption dropout.
    """

    def __init__(
        self, batch: Any, sources: Sequence[ResolvedSource], entries: Sequence[EntrySpec], held_out: bool = False
    ) -> None:
        self.batch, self.sources, self.entries, self.held_out = batch, sources, entries, held_out

    def __len__(self) -> int:
        return len(self.batch)

    def _made(self, start: int, stop: int) -> Sequence[Item]:
        part = self.batch.slice(start, stop - start)
        names, rows = part.schema.names, rows_of(part)
        samples = samples_in(part, self.sources).stored  # an item has no caption
        return [self._item(s, dict(zip(names, row, strict=True))) for s, row in zip(samples, rows, strict=True)]

    def _item(self, sample: Sample, row: Mapping[str, Any]) -> Item:
        """Return the item for a sample and its table row."""
        # Crop and views.
        options, geometry = sample.options, None
        if CUT in row:
            geometry = _geometry(sample, {**row, CUT: np.frombuffer(row[CUT], np.int32)})
        views = views_of(options)[: 1 if self.held_out else None]
        num_views = len(views)
        # Cache keys by entry, and the content that identifies the data.
        num_captions, keys, content = 1, dict[str, Grid](), list[tuple[str, ...]]()
        for entry in self.entries:
            flat = keys_in(row[f"key {entry.name}"])
            if not entry.has_captions:
                keys[entry.name] = tuple((key,) for key in flat[:num_views])
                content.append(keys_in(row[f"whole {entry.name}"])[:num_views])
                continue
            size = len(flat) // (num_views if entry.has_views else 1)
            keys[entry.name] = tuple(flat[at : at + size] for at in range(0, len(flat), size))
            num_captions = size - 1
        if sample.given.loss_weight != 1.0:  # part of the content, because a resumed run would see another loss
            content.append((f"loss weight {sample.given.loss_weight!r}",))
        batch_size = 0 if self.held_out else self.sources[sample.source].max_batch_size or 0
        if batch_size:
            content.append((f"batch size {batch_size}",))
        content += [keys[entry.name][0] for entry in self.entries if entry.inputs == (CAPTION,)]
        return Item(
            key=sample.key,
            shape=_shape(_lengths(row)),
            keys=keys,
            num_views=num_views,
            num_captions=num_captions,
            dropout_rate=0.0 if self.held_out else options.caption_dropout_rate,
            repeats=1 if self.held_out else sample.repeats,
            loss_weight=options.weight * sample.given.loss_weight,
            share=row[SHARE],
            geometry=geometry,
            content=tuple(content),
            lengths=_summed(row[f"length {entry.name}"] for entry in self.entries if entry.caption_mask),
            crops=_crops(sample, geometry, views),
            batch_size=batch_size,
        )

    def outline(self) -> Outline:
        """Return the outline of the items, from which a plan is made.

        It reads the samples' names from the table on each iteration.
        """
        lengths = {axis: numbers_of(self.batch[AXIS + axis]) for axis in axes_of(self.entries)}
        shape_N = np.zeros(len(self), np.int64)
        for length_N in lengths.values():  # number the shapes in the order of their lengths, axis by axis
            codes_N = shape_N * (length_N.max(initial=0) + 1) + length_N
            _, first, shape_N = np.unique(codes_N, return_index=True, return_inverse=True)
        shapes = [_shape({axis: int(length_N[at]) for axis, length_N in lengths.items()}) for at in first.tolist()]
        share_N = numbers_of(self.batch[SHARE]).astype(np.int32)
        repeats_N = np.ones(len(self), np.int64) if self.held_out else numbers_of(self.batch["repeats"])
        batch_sizes = [0 if self.held_out else source.max_batch_size or 0 for source in self.sources]
        batch_N = np.array(batch_sizes, np.int64)[numbers_of(self.batch["source"])]
        return Outline(_Names(self.batch["key"]), shapes, shape_N, repeats_N, share_N, batch_N, self._texts())

    def _texts(self) -> TextLengths | None:
        """Return ``Outline.texts``: lengths of captions and dropout rates; None if no entry has a ``caption_mask``."""
        found = [lengths_in(self.batch[f"length {entry.name}"]) for entry in self.entries if entry.caption_mask]
        if not found:
            return None
        rates = [0.0 if self.held_out else source.caption_dropout_rate for source in self.sources]
        dropout_N = np.array(rates)[numbers_of(self.batch["source"])]
        length_L: NDArray[np.int64] = np.sum([lengths for _, lengths in found], axis=0)
        return TextLengths(found[0][0], length_L, dropout_N)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return id(self)


class _Names(Lazy[str]):
    """Sequence of a column's texts, decoded on access."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def _made(self, start: int, stop: int) -> Sequence[str]:
        return [text_of(value) for value in self._column.slice(start, stop - start).to_pylist()]


def samples_in(batch: Any, sources: Sequence[ResolvedSource]) -> Samples:
    """Return the samples in these table rows."""
    return Samples(sources, batch.select(sample_schema().names))


def byte_rows(column: Any) -> NDArray[np.uint8]:
    """Return a view of a column of fixed-size bytes, as a uint8 array with one row per value."""
    width = column.type.byte_width
    start = column.offset * width
    return np.frombuffer(column.buffers()[1], np.uint8)[start : start + len(column) * width].reshape(-1, width)


def lengths_in(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the contents of a column of lengths: the number of lengths in each row, and all lengths concatenated."""
    sizes_N = numbers_of(compute.binary_length(column))
    return sizes_N // LENGTH_BYTES, np.frombuffer(b"".join(column.to_pylist()), LENGTH_TYPE).astype(np.int64)


def _summed(cells: Iterable[bytes]) -> tuple[int, ...]:
    """Add the lists of lengths in several cells of a table row, position by position."""
    return tuple(map(sum, zip(*(np.frombuffer(cell, LENGTH_TYPE).tolist() for cell in cells), strict=True)))


def keys_in(raw: bytes) -> tuple[str, ...]:
    """Return the cache keys in one table cell, in hexadecimal."""
    return tuple(raw[at : at + KEY_BYTES].hex() for at in range(0, len(raw), KEY_BYTES))


def _geometry(sample: Sample, row: Mapping[str, Any]) -> Geometry:
    """Return the geometry of a sample, built from its table row."""
    height, width, top, left = row[CUT].tolist()
    target_hw = int(row[f"{AXIS}h"]), int(row[f"{AXIS}w"])
    return Geometry((sample.height, sample.width), (height, width), (top, left), target_hw)


def _crops(sample: Sample, geometry: Geometry | None, views: Sequence[ImageView]) -> tuple[Geometry, ...]:
    """Return ``Item.crops``: the crop of each view, or () if all views have the same crop."""
    crops = () if geometry is None else tuple(view_geometry(geometry, sample, view) for view in views)
    return crops if len(set(crops)) > 1 else ()


def identity(items: Iterable[Item]) -> str:
    """Return a hash of the items to train on and of their order, in hexadecimal."""
    digest = hashlib.sha256(b"[")
    for number, item in enumerate(items):
        parts = repr((item.key, item.repeats, item.content))
        digest.update((", " * bool(number) + parts).encode("utf-8"))
    digest.update(b"]")
    return digest.hexdigest()
