"""The samples of a run as an Arrow table with their crops and cache keys, and the plan's items over that table.

A sample takes some 300 bytes in addition to its name and caption; as objects it would take several thousand.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import compute

from lora_rocm.dataset.batch_sampler import Grid, Item, Outline, TextLengths
from lora_rocm.dataset.buckets import Geometry, image_shape
from lora_rocm.dataset.columns import Lazy
from lora_rocm.dataset.entry_spec import CAPTION
from lora_rocm.dataset.sample_table import Sample, Samples, numbers_of, rows_of, sample_schema, text_of
from lora_rocm.dataset.shape import Shape
from lora_rocm.dataset.views import View, view_geometry, views_of
from lora_rocm.latent_cache.image_preprocess import Looked, Wanted

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import EntrySpec
    from lora_rocm.recipe.schema import ResolvedSource

HASH_BYTES, KEY_BYTES, LENGTH_BYTES = 32, 20, 4
MIN_VIEWS = 2  # an image and its mirror image
LENGTH_TYPE = f"<u{LENGTH_BYTES}"
CUT = struct.Struct("=6i")  # (height, width) of the scaled image, (top, left) and (height, width) of the crop
NO_CUT = CUT.pack(*[0] * 6)
ByteRows: TypeAlias = NDArray[np.uint8]
ANY_SHAPE = Shape.of(samples=1)
"""The shape of samples whose entries do not depend on size: all are in one bucket."""


def _share(cut: Sequence[int]) -> int:
    """``Item.share`` of a row: that of a text stands where an image has the left side of its crop."""
    return 1 if cut[0] else max(cut[3], 1)


def _shape(height: int, width: int) -> Shape:
    """The shape of an image; with height 0, that of a text of ``width`` tokens, or ANY_SHAPE if both are 0."""
    if height:
        return image_shape((height, width))
    return Shape.of(tokens=width) if width else ANY_SHAPE


def slot_bytes(sources: Iterable[ResolvedSource]) -> int:
    """Bytes of the keys of all views of an image, with room for the views of the source that has the most."""
    return KEY_BYTES * max(MIN_VIEWS, *(len(views_of(source)) for source in sources))


def table_schema(entries: Iterable[EntrySpec], size: int) -> Any:
    """The Arrow schema of the table: the columns of samples, then crop and image hash, then the keys of their entries.

    The keys of an entry made from captions are concatenated: per view, the caption variants and then the empty caption.
    An entry made from the image alone has a slot of ``size`` bytes (``slot_bytes``); "whole" holds the keys of the
    untiled entries. For entries with a ``caption_mask``, "length" holds the bytes of that mask for each key.
    """
    schema = sample_schema()
    schema = schema.append(pyarrow.field("cut", pyarrow.binary(CUT.size)))
    schema = schema.append(pyarrow.field("sha256", pyarrow.binary(HASH_BYTES)))
    for entry in entries:
        kind = pyarrow.large_binary() if entry.has_captions else pyarrow.binary(size)
        schema = schema.append(pyarrow.field(f"key {entry.name}", kind))
        if not entry.has_captions:
            schema = schema.append(pyarrow.field(f"whole {entry.name}", kind))
        if entry.caption_mask:
            schema = schema.append(pyarrow.field(f"length {entry.name}", kind))
    return schema


def check_table(batch: Any, entries: Iterable[EntrySpec], sources: Sequence[ResolvedSource]) -> None:
    """Validate a table from a file, including its references to sources and its key lists.

    Raises:
        ValueError, pyarrow.ArrowException: it is damaged, or not a table of these entries.
    """
    batch.validate(full=True)
    if batch.schema != table_schema(entries, slot_bytes(sources)) or any(column.null_count for column in batch.columns):
        raise ValueError("another table")
    if not (0 <= compute.min(batch["source"]).as_py() and compute.max(batch["source"]).as_py() < len(sources)):
        raise ValueError("a source that is none")
    for entry in entries:
        sizes = numbers_of(compute.binary_length(batch[f"key {entry.name}"]))
        if (sizes < 2 * KEY_BYTES).any() or (sizes % KEY_BYTES).any():
            raise ValueError("a list of keys that is none")
        if entry.caption_mask and (lengths_in(batch[f"length {entry.name}"])[0] * KEY_BYTES != sizes).any():
            raise ValueError("not one length for each key")


def entry_keys(batch: Any, entries: Iterable[EntrySpec]) -> dict[str, bytes]:
    """The keys of all entries in a table, concatenated per entry name, KEY_BYTES each."""
    keys = {}
    for entry in entries:
        keys_NK = np.frombuffer(b"".join(batch[f"key {entry.name}"].to_pylist()), np.uint8).reshape(-1, KEY_BYTES)
        keys[entry.name] = keys_NK[keys_NK.any(axis=1)].tobytes()
    return keys


class KeyLists:
    """A column of the table with a list of cache keys, or of lengths, per row."""

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
        """The column as an Arrow array of bytes."""
        buffers = [None, pyarrow.py_buffer(self._ends), pyarrow.py_buffer(self._bytes)]
        return pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), len(self._ends) - 1, buffers)


class Usable(Lazy[Wanted]):
    """The usable samples, with their crops, image hashes and the cache keys found so far.

    Args:
        samples: N samples.
        cuts_NB: crop of each image, packed by CUT; NO_CUT if no image is read.
        sha256_NB: hash of each image file; zeros if it is not known.
        keys_NB: column of the table -> cache keys, for entries made from the image alone.
    """

    def __init__(
        self, samples: Samples, cuts_NB: ByteRows, sha256_NB: ByteRows, keys_NB: Mapping[str, ByteRows]
    ) -> None:
        self.samples, self._cuts_NB, self._sha256_NB, self._keys_NB = samples, cuts_NB, sha256_NB, keys_NB
        self._num_found_N = np.zeros(len(samples), np.uint8)

    @classmethod
    def unfilled(cls, samples: Samples, cuts: bytearray, entries: Iterable[str]) -> Usable:
        """Samples without any keys or hashes yet. ``entries``: names of the entries made from the image alone."""
        columns = [f"{kind} {name}" for name in entries for kind in ("key", "whole")]
        size = slot_bytes(samples.sources)
        zeros = {column: np.zeros((len(samples), size), np.uint8) for column in columns}
        cuts_NB = np.frombuffer(cuts, np.uint8).reshape(-1, CUT.size)
        return cls(samples, cuts_NB, np.zeros((len(samples), HASH_BYTES), np.uint8), zeros)

    @classmethod
    def of_table(cls, batch: Any, sources: Sequence[ResolvedSource]) -> Usable:
        """The samples of a table, for encoding entries again."""
        return cls(samples_in(batch, sources), byte_rows(batch["cut"]), byte_rows(batch["sha256"]), {})

    def table(self, entries: Iterable[EntrySpec], captions: Mapping[str, KeyLists]) -> Any:
        """The table as an Arrow record batch with ``table_schema``. ``captions``: column -> keys."""
        fixed = {"cut": self._cuts_NB, "sha256": self._sha256_NB, **self._keys_NB}
        columns = {name: lists.column for name, lists in captions.items()}
        for name, rows_NB in fixed.items():
            kind, rows_NB = pyarrow.binary(rows_NB.shape[1]), np.ascontiguousarray(rows_NB)
            columns[name] = pyarrow.FixedSizeBinaryArray.from_buffers(
                kind, len(rows_NB), [None, pyarrow.py_buffer(rows_NB)]
            )
        of_samples, schema = self.samples.batch, table_schema(entries, slot_bytes(self.samples.sources))
        rest = [columns[name] for name in schema.names[of_samples.num_columns :]]
        return pyarrow.record_batch([*of_samples.columns, *rest], schema)

    def ordered(self, indices: NDArray[np.int64]) -> Usable:
        """The samples at these indices, in that order."""
        keys_NB = {column: rows_NB[indices] for column, rows_NB in self._keys_NB.items()}
        return Usable(self.samples.at(indices), self._cuts_NB[indices], self._sha256_NB[indices], keys_NB)

    def repeated(self, repeats_N: NDArray[np.int64]) -> Usable:
        """The same samples with other repeats."""
        return Usable(self.samples.repeated(repeats_N), self._cuts_NB, self._sha256_NB, self._keys_NB)

    def __len__(self) -> int:
        return len(self.samples)

    def _made(self, start: int, stop: int) -> Sequence[Wanted]:
        return [self._wanted(index, sample) for index, sample in enumerate(self.samples[start:stop], start)]

    def _wanted(self, index: int, sample: Sample) -> Wanted:
        geometry = geometry_of_cut(sample, self._cuts_NB[index].tobytes())
        assert geometry is not None, "only images are wanted in the cache"
        return Wanted(sample, geometry, views_of(sample.options), self.sha256(index))

    def found(self, index: int, entry: str, looked: Looked) -> None:
        """Record that the entries of one kind are in the cache, with their keys."""
        self.hashed(index, looked.sha256)
        for number, made in enumerate(looked.entries):
            part = slice(number * KEY_BYTES, (number + 1) * KEY_BYTES)
            for kind, key in (("key", made.key), ("whole", made.whole_key)):
                self._keys_NB[f"{kind} {entry}"][index, part] = bytearray.fromhex(key)
        self._num_found_N[index] += 1

    def hashed(self, index: int, sha256: str) -> None:
        """Record the hash of a sample's image file."""
        self._sha256_NB[index] = bytearray.fromhex(sha256)

    def counted(self, index: int, num_tokens: int, share: int) -> None:
        """Record the number of tokens of a text, and its share of the loss."""
        self._cuts_NB[index] = bytearray(CUT.pack(0, 0, 0, share, 0, num_tokens))

    def sha256(self, index: int) -> str:
        """The hash (hex) of a sample's image file; empty if it is not known."""
        sha256 = self._sha256_NB[index].tobytes()
        return sha256.hex() if any(sha256) else ""

    @property
    def ready(self) -> NDArray[np.int64]:
        """Sorted indices of the samples whose image entries are all in the cache."""
        return np.flatnonzero(2 * self._num_found_N == len(self._keys_NB))

    def shape(self, index: int) -> Shape:
        """The shape of a sample."""
        *_, height, width = CUT.unpack(self._cuts_NB[index].tobytes())
        return _shape(height, width)


class Items(Lazy[Item]):
    """The items of a plan, built from table rows on access.

    Args:
        batch: rows of the table.
        sources: sources of the recipe.
        entries: entries of the family.
        held_out: the items are for the validation loss: no mirroring, repeats or caption dropout.
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
        """Build an item from a sample and its row of the table."""
        options, geometry = sample.options, geometry_of_cut(sample, row["cut"])
        views = views_of(options)[: 1 if self.held_out else None]
        num_views = len(views)
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
        if sample.given.loss_weight != 1.0:  # a resumed run would see another loss
            content.append((f"loss weight {sample.given.loss_weight!r}",))
        batch_size = 0 if self.held_out else self.sources[sample.source].max_batch_size or 0
        if batch_size:
            content.append((f"batch size {batch_size}",))
        content += [keys[entry.name][0] for entry in self.entries if entry.inputs == (CAPTION,)]
        return Item(
            key=sample.key,
            shape=_shape(*CUT.unpack(row["cut"])[4:]),
            keys=keys,
            num_views=num_views,
            num_captions=num_captions,
            dropout_rate=0.0 if self.held_out else options.caption_dropout_rate,
            repeats=1 if self.held_out else sample.repeats,
            loss_weight=options.weight * sample.given.loss_weight,
            share=_share(CUT.unpack(row["cut"])),
            geometry=geometry,
            content=tuple(content),
            lengths=_summed(row[f"length {entry.name}"] for entry in self.entries if entry.caption_mask),
            crops=_crops(sample, geometry, views),
            batch_size=batch_size,
        )

    def outline(self) -> Outline:
        """The outline for a plan; reads the sample keys from the table on each iteration."""
        cuts_N6 = byte_rows(self.batch["cut"]).view(np.int32)
        targets_N2 = cuts_N6[:, 4:].astype(np.int64)
        share_N = np.where(cuts_N6[:, 0], 1, np.maximum(cuts_N6[:, 3], 1)).astype(np.int32)
        sizes, shape_N = np.unique(targets_N2[:, 0] << 32 | targets_N2[:, 1], return_inverse=True)
        shapes = [_shape(*divmod(size, 1 << 32)) for size in sizes.tolist()]
        repeats_N = np.ones(len(self), np.int64) if self.held_out else numbers_of(self.batch["repeats"])
        batch_sizes = [0 if self.held_out else source.max_batch_size or 0 for source in self.sources]
        batch_N = np.array(batch_sizes, np.int64)[numbers_of(self.batch["source"])]
        return Outline(_Names(self.batch["key"]), shapes, shape_N, repeats_N, share_N, batch_N, self._texts())

    def _texts(self) -> TextLengths | None:
        """``Outline.texts``."""
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
    """The decoded texts of a column."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def _made(self, start: int, stop: int) -> Sequence[str]:
        return [text_of(value) for value in self._column.slice(start, stop - start).to_pylist()]


def samples_in(batch: Any, sources: Sequence[ResolvedSource]) -> Samples:
    """The samples of table rows."""
    return Samples(sources, batch.select(sample_schema().names))


def byte_rows(column: Any) -> ByteRows:
    """View a column of fixed-size bytes as an array with one row per value."""
    width = column.type.byte_width
    start = column.offset * width
    return np.frombuffer(column.buffers()[1], np.uint8)[start : start + len(column) * width].reshape(-1, width)


def lengths_in(column: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A column of lengths: how many each row has, and all of them one after another."""
    sizes_N = numbers_of(compute.binary_length(column))
    return sizes_N // LENGTH_BYTES, np.frombuffer(b"".join(column.to_pylist()), LENGTH_TYPE).astype(np.int64)


def _summed(cells: Iterable[bytes]) -> tuple[int, ...]:
    """The sums of the lengths in several cells of one row of the table."""
    return tuple(map(sum, zip(*(np.frombuffer(cell, LENGTH_TYPE).tolist() for cell in cells), strict=True)))


def keys_in(raw: bytes) -> tuple[str, ...]:
    """The cache keys in one cell of the table."""
    return tuple(raw[at : at + KEY_BYTES].hex() for at in range(0, len(raw), KEY_BYTES))


def geometry_of_cut(sample: Sample, cut: bytes) -> Geometry | None:
    """The geometry of a sample from its packed crop; None if no image is read."""
    height, width, top, left, target_height, target_width = CUT.unpack(cut)
    if not height:
        return None
    return Geometry((sample.height, sample.width), (height, width), (top, left), (target_height, target_width))


def _crops(sample: Sample, geometry: Geometry | None, views: Sequence[View]) -> tuple[Geometry, ...]:
    """``Item.crops``."""
    crops = () if geometry is None else tuple(view_geometry(geometry, sample, view) for view in views)
    return crops if len(set(crops)) > 1 else ()


def identity(items: Iterable[Item]) -> str:
    """A hash of the items to train on and their order."""
    digest = hashlib.sha256(b"[")
    for number, item in enumerate(items):
        parts = repr((item.key, item.repeats, item.content))
        digest.update((", " * bool(number) + parts).encode("utf-8"))
    digest.update(b"]")
    return digest.hexdigest()
