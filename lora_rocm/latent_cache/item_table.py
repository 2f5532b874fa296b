"""The samples of a run in columns: how each is cut, its entries in the cache, and the items of the plan over them.

Some 200 bytes a sample beside its name and caption; as objects they would take several thousand.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lora_rocm.dataset.batch_sampler import Grid, Item, Outline
from lora_rocm.dataset.buckets import Geometry, image_shape
from lora_rocm.dataset.columns import KEY_BYTES, Keys, Lazy, all_below
from lora_rocm.dataset.scan import Sample, Samples
from lora_rocm.dataset.shape import Shape
from lora_rocm.latent_cache.image_preprocess import Looked, Wanted

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import EntrySpec
    from lora_rocm.recipe.schema import ResolvedSource

HASH_BYTES = 32
CUT_NUMBERS = 6
SLOT_BYTES = 2 * KEY_BYTES  # an image and its mirror image
NO_CUT = (0,) * CUT_NUMBERS
ANY_SHAPE = Shape.of(samples=1)
"""Of samples whose size no entry follows: all lie in one bucket."""


def _shape(height: int, width: int) -> Shape:
    """The shape of an image; without a height ``width`` is the number of tokens of a text, or nothing is known."""
    if height:
        return image_shape((height, width))
    return Shape.of(tokens=width) if width else ANY_SHAPE


def flips_of(options: ResolvedSource) -> tuple[bool, ...]:
    """The image as it is, and with flip_aug its mirror image."""
    return (False, True) if options.flip_aug else (False,)


class Usable(Lazy[Wanted]):
    """The samples that can be used; each has a place here, which is not its index among the samples.

    entries: names of the entries that are made from the image alone.
    """

    def __init__(self, samples: Samples, entries: Iterable[str]) -> None:
        self.samples = samples
        self._indices, self._cuts = array("q"), array("i")
        self._hashes, self._found = bytearray(), bytearray()
        self._keys = {name: bytearray() for name in entries}
        self._whole_keys = {name: bytearray() for name in self._keys}

    def append(self, index: int, cut: Geometry | None) -> None:
        """One more: the index of its sample, and how its image is cut (None: no image is read)."""
        self._indices.append(index)
        self._cuts.extend(NO_CUT if cut is None else (*cut.resized_hw, *cut.crop_top_left, *cut.target_hw))
        self._hashes += bytes(HASH_BYTES)
        self._found.append(0)
        for column in (*self._keys.values(), *self._whole_keys.values()):
            column += bytes(SLOT_BYTES)

    def __len__(self) -> int:
        return len(self._indices)

    def _made(self, index: int) -> Wanted:
        sample, geometry = self.sample(index), self.geometry(index)
        assert geometry is not None, "only images are wanted in the cache"
        sha256 = self.sha256(index)
        return Wanted(sample, geometry, flips_of(sample.options), sha256.hex() if any(sha256) else "")

    def found(self, place: int, entry: str, looked: Looked) -> None:
        """The entries of one kind are in the cache."""
        self.hashed(place, looked.sha256)
        at = SLOT_BYTES * place
        for number, made in enumerate(looked.entries):
            part = slice(at + number * KEY_BYTES, at + (number + 1) * KEY_BYTES)
            self._keys[entry][part] = bytes.fromhex(made.key)
            self._whole_keys[entry][part] = bytes.fromhex(made.whole_key)
        self._found[place] += 1

    def hashed(self, place: int, sha256: str) -> None:
        """The hash of its image file is known."""
        self._hashes[HASH_BYTES * place : HASH_BYTES * (place + 1)] = bytes.fromhex(sha256)

    @property
    def ready(self) -> array[int]:
        """The places of those whose entries are all there, in order."""
        return array("q", (place for place, count in enumerate(self._found) if count == len(self._keys)))

    def counted(self, place: int, num_tokens: int) -> None:
        """The number of tokens of a text is known."""
        self._cuts[CUT_NUMBERS * place + 5] = num_tokens

    def is_ready(self, place: int) -> bool:
        """Whether the entries of one are all there."""
        return self._found[place] == len(self._keys)

    def is_whole(self, num_sources: int) -> bool:
        """Whether every number points to something: for columns from a file."""
        count = len(self)
        sizes = [len(column) for column in (self._cuts, self._hashes, self._found)]
        slots = [len(column) for column in (*self._keys.values(), *self._whole_keys.values())]
        return (
            sizes == [CUT_NUMBERS * count, HASH_BYTES * count, count]
            and set(slots) <= {SLOT_BYTES * count}
            and all_below(self._indices, len(self.samples))
            and self.samples.is_whole(num_sources)
        )

    def sample(self, place: int) -> Sample:
        """The sample of one."""
        return self.samples[self._indices[place]]

    def sample_key(self, place: int) -> str:
        """The key of its sample."""
        return self.samples.key(self._indices[place])

    def options(self, place: int) -> ResolvedSource:
        """The options of its source."""
        return self.samples.options(self._indices[place])

    def sha256(self, place: int) -> bytes:
        """Of the image file of one; zeros if no image is read."""
        return bytes(self._hashes[HASH_BYTES * place : HASH_BYTES * (place + 1)])

    def shape(self, place: int) -> Shape:
        """The shape of one."""
        return _shape(*self._cuts[CUT_NUMBERS * place + 4 : CUT_NUMBERS * (place + 1)])

    def shapes(self, places: Sequence[int]) -> tuple[list[Shape], NDArray[np.int64]]:
        """The shapes of many: each shape once, and for each place its index among these."""
        cuts_PC = np.frombuffer(self._cuts, dtype=np.intc).reshape(-1, CUT_NUMBERS)
        height_N, width_N = cuts_PC[np.array(places, dtype=np.int64), 4:].astype(np.int64).T
        sizes, shape_N = np.unique(height_N << 32 | width_N, return_inverse=True)
        return [_shape(*divmod(size, 1 << 32)) for size in sizes.tolist()], shape_N

    def geometry(self, place: int) -> Geometry | None:
        """How the image of one is cut."""
        height, width, top, left, *target = self._cuts[CUT_NUMBERS * place : CUT_NUMBERS * (place + 1)]
        if not height:
            return None
        original_hw = self.samples.size_hw(self._indices[place])
        return Geometry(original_hw, (height, width), (top, left), (target[0], target[1]))

    def repeats(self, place: int) -> int:
        """How often one is seen in an epoch."""
        return self.samples.repeats(self._indices[place])

    def all_keys(self) -> dict[str, bytes]:
        """The keys of all entries by entry, KEY_BYTES each."""
        columns = ((n, np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)) for n, keys in self._keys.items())
        return {name: keys_NK[keys_NK.any(axis=1)].tobytes() for name, keys_NK in columns}

    def image_keys(self, place: int, num_views: int, whole: bool = False) -> dict[str, tuple[str, ...]]:
        """The keys of the first views by entry; ``whole``: as if no image had been encoded in tiles."""
        at = SLOT_BYTES * place
        ends = [at + number * KEY_BYTES for number in range(num_views + 1)]
        columns = self._whole_keys if whole else self._keys
        return {
            name: tuple(column[start:end].hex() for start, end in zip(ends, ends[1:], strict=False))
            for name, column in columns.items()
        }


class Items(Lazy[Item]):
    """The items of a plan.

    Args:
        usable: all samples.
        places: those of these items.
        captions: for each entry that is made from captions its keys, item by item: view by view, and of each view the
            variants and then the empty caption.
        entries: of the family.
        held_out: for the validation loss: neither mirrored, repeated nor without caption.
    """

    def __init__(
        self,
        usable: Usable,
        places: Sequence[int],
        captions: Mapping[str, Keys],
        entries: Sequence[EntrySpec],
        held_out: bool = False,
    ) -> None:
        self.usable, self.places, self.captions = usable, places, captions
        self.entries, self.held_out = entries, held_out

    def __len__(self) -> int:
        return len(self.places)

    def _made(self, index: int) -> Item:
        place = self.places[index]
        options = self.usable.options(place)
        num_views = 1 if self.held_out else len(flips_of(options))
        images = self.usable.image_keys(place, num_views)
        num_captions, keys = 1, dict[str, Grid]()
        for entry in self.entries:
            if not entry.has_captions:
                keys[entry.name] = tuple((key,) for key in images[entry.name])
                continue
            flat = self.captions[entry.name][index]
            size = len(flat) // (num_views if entry.has_views else 1)
            keys[entry.name] = tuple(flat[at : at + size] for at in range(0, len(flat), size))
            num_captions = size - 1
        return Item(
            key=self.usable.sample_key(place),
            shape=self.usable.shape(place),
            keys=keys,
            num_views=num_views,
            num_captions=num_captions,
            dropout_rate=0.0 if self.held_out else options.caption_dropout_rate,
            repeats=1 if self.held_out else self.usable.repeats(place),
            geometry=self.usable.geometry(place),
            content=self._content(index, num_views),
        )

    def _content(self, index: int, num_views: int) -> tuple[tuple[str, ...], ...]:
        """The keys of whole images, and of captions alone."""
        images = self.usable.image_keys(self.places[index], num_views, whole=True).values()
        captions = [e.name for e in self.entries if e.has_captions and not e.has_views]
        return (*images, *(self.captions[name][index] for name in captions))

    def outline(self) -> Outline:
        """What a plan's order is made from; the keys are not kept."""
        repeats = [1] * len(self) if self.held_out else map(self.usable.repeats, self.places)
        repeats_N = np.fromiter(repeats, np.int64, len(self))
        return Outline(_KeysOf(self.usable, self.places), *self.usable.shapes(self.places), repeats_N)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class _KeysOf:
    """The keys of the samples at some places."""

    usable: Usable
    places: Sequence[int]

    def __iter__(self) -> Iterator[str]:
        return map(self.usable.sample_key, self.places)


class SamplesOf(Lazy[Sample]):
    """The samples of items, in their order."""

    def __init__(self, usable: Usable, places: Sequence[int]) -> None:
        self._usable, self._places = usable, places

    def __len__(self) -> int:
        return len(self._places)

    def _made(self, index: int) -> Sample:
        return self._usable.sample(self._places[index])


def identity(items: Iterable[Item]) -> str:
    """A hash that changes if other items, or the same in another order, are trained on."""
    digest = hashlib.sha256(b"[")
    for number, item in enumerate(items):
        parts = repr((item.key, item.repeats, item.content))
        digest.update((", " * bool(number) + parts).encode("utf-8"))
    digest.update(b"]")
    return digest.hexdigest()
