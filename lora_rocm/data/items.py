"""The pictures of a run in columns: what is cut how, what is in the cache of each, and the items of the plan over them.

Some 200 bytes a picture beside its name and caption; as objects they would take several thousand.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from lora_rocm.data.buckets import Geometry, image_shape
from lora_rocm.data.columns import KEY_BYTES, Keys, Lazy, all_below
from lora_rocm.data.plan import Item, Outline
from lora_rocm.data.ready import Looked, Picture
from lora_rocm.data.samples import Sample, Samples
from lora_rocm.data.shape import Shape

if TYPE_CHECKING:
    from lora_rocm.recipe.schema import ResolvedSource

HASH_BYTES = 32
CUT_NUMBERS = 6
ITEM_FIELDS = tuple(field.name for field in fields(Item))
SLOT_BYTES = 2 * KEY_BYTES  # a picture and its mirror image


def flips_of(options: ResolvedSource) -> tuple[bool, ...]:
    """The picture as it is, and with flip_aug its mirror image."""
    return (False, True) if options.flip_aug else (False,)


class Pictures(Lazy[Picture]):
    """The samples that can be cut; each has a place here, which is not its index among the samples."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self._indices, self._cuts = array("q"), array("i")
        self._hashes, self._keys, self._plain_keys = bytearray(), bytearray(), bytearray()
        self._ready = bytearray()

    def append(self, index: int, cut: Geometry) -> None:
        """One more: the index of its sample."""
        self._indices.append(index)
        self._cuts.extend((*cut.resized_hw, *cut.crop_top_left, *cut.target_hw))
        self._hashes += bytes(HASH_BYTES)
        self._keys += bytes(SLOT_BYTES)
        self._plain_keys += bytes(SLOT_BYTES)
        self._ready.append(0)

    def __len__(self) -> int:
        return len(self._indices)

    def _made(self, index: int) -> Picture:
        sample = self.sample(index)
        sha256 = self.sha256(index).hex() if self._ready[index] else ""
        return Picture(sample, self.geometry(index), flips_of(sample.options), sha256)

    def found(self, place: int, looked: Looked) -> None:
        """Its entries are in the cache."""
        self._hashes[HASH_BYTES * place : HASH_BYTES * (place + 1)] = bytes.fromhex(looked.sha256)
        at = SLOT_BYTES * place
        for number, entry in enumerate(looked.entries):
            part = slice(at + number * KEY_BYTES, at + (number + 1) * KEY_BYTES)
            self._keys[part], self._plain_keys[part] = bytes.fromhex(entry.key), bytes.fromhex(entry.job.key)
        self._ready[place] = 1

    @property
    def ready(self) -> array[int]:
        """The places of those whose entries are there, in order."""
        return array("q", (place for place, ready in enumerate(self._ready) if ready))

    def is_ready(self, place: int) -> bool:
        """Whether the entries of one are there."""
        return bool(self._ready[place])

    def is_whole(self, num_sources: int) -> bool:
        """Whether every number points to something: for columns from a file."""
        count = len(self)
        sizes = [len(column) for column in (self._cuts, self._hashes, self._keys, self._plain_keys, self._ready)]
        return (
            sizes == [CUT_NUMBERS * count, HASH_BYTES * count, SLOT_BYTES * count, SLOT_BYTES * count, count]
            and all_below(self._indices, len(self.samples))
            and self.samples.is_whole(num_sources)
        )

    def sample(self, place: int) -> Sample:
        """The sample of one."""
        return self.samples[self._indices[place]]

    def sample_key(self, place: int) -> str:
        """The key of its sample."""
        return self.samples.key(self._indices[place])

    def sha256(self, place: int) -> bytes:
        """Of the file of one."""
        return bytes(self._hashes[HASH_BYTES * place : HASH_BYTES * (place + 1)])

    def shape(self, place: int) -> Shape:
        """The shape of one."""
        height, width = self._cuts[CUT_NUMBERS * place + 4 : CUT_NUMBERS * (place + 1)]
        return image_shape((height, width))

    def shapes(self, places: Sequence[int]) -> tuple[list[Shape], NDArray[np.int64]]:
        """The shapes of many: each shape once, and for each place its index among these."""
        cuts_PC = np.frombuffer(self._cuts, dtype=np.intc).reshape(-1, CUT_NUMBERS)
        height_N, width_N = cuts_PC[np.array(places, dtype=np.int64), 4:].astype(np.int64).T
        sizes, shape_N = np.unique(height_N << 32 | width_N, return_inverse=True)
        return [image_shape(divmod(size, 1 << 32)) for size in sizes.tolist()], shape_N

    def geometry(self, place: int) -> Geometry:
        """How one is cut."""
        height, width, top, left, *target = self._cuts[CUT_NUMBERS * place : CUT_NUMBERS * (place + 1)]
        original_hw = self.samples.size_hw(self._indices[place])
        return Geometry(original_hw, (height, width), (top, left), (target[0], target[1]))

    def repeats(self, place: int) -> int:
        """How often one is seen in an epoch."""
        return self.samples.repeats(self._indices[place])

    def all_keys(self) -> bytes:
        """The keys of all entries, KEY_BYTES each."""
        keys_NK = np.frombuffer(self._keys, dtype=np.uint8).reshape(-1, KEY_BYTES)
        return keys_NK[keys_NK.any(axis=1)].tobytes()

    def num_entries(self, place: int) -> int:
        """Of one that is ready: with flip_aug there is that of its mirror image too. To make the sample takes long."""
        return 1 + any(self._keys[SLOT_BYTES * place + KEY_BYTES : SLOT_BYTES * (place + 1)])

    def entry_keys(self, place: int, count: int, plain: bool) -> tuple[str, ...]:
        """Cache keys of the first entries; ``plain``: as if none were in tiles."""
        column, at = self._plain_keys if plain else self._keys, SLOT_BYTES * place
        return tuple(column[at + n * KEY_BYTES : at + (n + 1) * KEY_BYTES].hex() for n in range(count))


class ItemView:
    """An ``Item`` whose parts are made when they are asked for."""

    __slots__ = ("_at", "_items")

    def __init__(self, items: Items, at: int) -> None:
        self._items, self._at = items, at

    @property
    def _place(self) -> int:
        return self._items.places[self._at]

    @property
    def key(self) -> str:
        return self._items.pictures.sample_key(self._place)

    @property
    def geometry(self) -> Geometry:
        return self._items.pictures.geometry(self._place)

    @property
    def shape(self) -> Shape:
        return self._items.pictures.shape(self._place)

    @property
    def image_keys(self) -> tuple[str, ...]:
        return self._items.pictures.entry_keys(self._place, self._num_entries, plain=False)

    @property
    def picture_keys(self) -> tuple[str, ...]:
        return self._items.pictures.entry_keys(self._place, self._num_entries, plain=True)

    @property
    def text_keys(self) -> tuple[str, ...]:
        return self._items.text_keys[self._at]

    @property
    def dropout_key(self) -> str:
        return self._items.dropout_key

    @property
    def dropout_rate(self) -> float:
        return 0.0 if self._items.held_out else self._sample.options.caption_dropout_rate

    @property
    def repeats(self) -> int:
        return 1 if self._items.held_out else self._items.pictures.repeats(self._place)

    @property
    def _sample(self) -> Sample:
        return self._items.pictures.sample(self._place)

    @property
    def _num_entries(self) -> int:
        return 1 if self._items.held_out else self._items.pictures.num_entries(self._place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item | ItemView) and all(getattr(self, n) == getattr(other, n) for n in ITEM_FIELDS)

    def __hash__(self) -> int:
        return hash(self.key)


class Items(Lazy[Item]):
    """The items of a plan. ``held_out``: of the validation loss, neither mirrored, repeated nor without caption."""

    def __init__(
        self, pictures: Pictures, places: Sequence[int], text_keys: Keys, dropout_key: str, held_out: bool = False
    ) -> None:
        self.pictures, self.places, self.text_keys = pictures, places, text_keys
        self.dropout_key, self.held_out = dropout_key, held_out

    def __len__(self) -> int:
        return len(self.places)

    def _made(self, index: int) -> Item:
        return cast("Item", ItemView(self, index))

    def outline(self) -> Outline:
        """What a plan's order is made from; the keys are not kept."""
        repeats = [1] * len(self) if self.held_out else map(self.pictures.repeats, self.places)
        repeats_N = np.fromiter(repeats, np.int64, len(self))
        return Outline(_KeysOf(self.pictures, self.places), *self.pictures.shapes(self.places), repeats_N)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class _KeysOf:
    """The keys of the samples at some places."""

    pictures: Pictures
    places: Sequence[int]

    def __iter__(self) -> Iterator[str]:
        return map(self.pictures.sample_key, self.places)


class SamplesOf(Lazy[Sample]):
    """The samples of items, in their order."""

    def __init__(self, pictures: Pictures, places: Sequence[int]) -> None:
        self._pictures, self._places = pictures, places

    def __len__(self) -> int:
        return len(self._places)

    def _made(self, index: int) -> Sample:
        return self._pictures.sample(self._places[index])


def identity(items: Iterable[Any]) -> str:
    """A hash that changes when other items, or the same in another order, are trained on."""
    digest = hashlib.sha256(b"[")
    for number, item in enumerate(items):
        parts = repr((item.key, item.repeats, item.picture_keys, item.text_keys))
        digest.update((", " * bool(number) + parts).encode("utf-8"))
    digest.update(b"]")
    return digest.hexdigest()
