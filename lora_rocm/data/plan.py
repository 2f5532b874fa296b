"""Which samples make up which update: a pure function of (seed, epoch). No torch.

An epoch is a list of effective batches (all rows of one update), each from one bucket. Ranks and micro-batches only
slice them, so the same recipe gives the same updates whole or split. A bucket's last batch is filled with rows of
weight 0, so shapes never change. The very first batch is one of the largest pictures: what does not fit into memory
shows at once, and the allocator's first pieces are large enough for all that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_rocm.data.buckets import Geometry, Size
from lora_rocm.data.seeds import draw, fraction

NUM_EPOCHS_KEPT = 2  # readers that run ahead cross the end of an epoch before the loop does


@dataclass(frozen=True)
class Item:
    """One picture to train on. ``key``: its sample's.

    image_keys: cache keys of the picture and, with flip_aug, of its mirror image.
    text_keys: cache keys of its caption variants.
    dropout_key: cache key of the empty caption, which takes their place at ``dropout_rate``.
    picture_keys: the image_keys as if nothing had been encoded in tiles: they say which pictures these are.
    """

    key: str
    geometry: Geometry
    image_keys: tuple[str, ...]
    text_keys: tuple[str, ...]
    dropout_key: str
    dropout_rate: float
    repeats: int
    picture_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One sample of one update. ``position``: its index in the effective batch; ``weight``: its share of the loss."""

    item: Item
    position: int
    weight: float
    flip: bool
    variant: int
    dropout: bool

    @property
    def image_key(self) -> str:
        return self.item.image_keys[int(self.flip)]

    @property
    def text_key(self) -> str:
        return self.item.dropout_key if self.dropout else self.item.text_keys[self.variant]


class BatchPlan:
    """The order of training.

    Args:
        items: in an order that does not change between starts; their keys are unique. Not copied: they may be many.
        batch_size: samples of one micro-batch.
        accumulation: micro-batches of one update on each rank.
        seed: decides order, mirroring, caption variants and dropout.
        world: number of ranks.
        rank: this one.
    """

    def __init__(
        self, items: Sequence[Item], batch_size: int, accumulation: int, seed: int, world: int = 1, rank: int = 0
    ) -> None:
        self.items, self.batch_size, self.accumulation = items, batch_size, accumulation
        self.seed, self.world, self.rank = seed, world, rank
        self._places: dict[Size, list[tuple[int, int]]] = {}  # bucket -> (item, repeat)
        for index, item in enumerate(self.items):
            places = self._places.setdefault(item.geometry.target_hw, [])
            places.extend((index, repeat) for repeat in range(item.repeats))
        self._epochs: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def effective_batch(self) -> int:
        """Rows of one update, on all ranks."""
        return self.batch_size * self.accumulation * self.world

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-len(places) // self.effective_batch) for places in self._places.values())

    def rows(self, iteration: int) -> list[Row]:
        """Every row of one effective batch, on all ranks. The weights of its real samples are equal and sum to 1."""
        return self._rows(iteration, range(self.effective_batch))

    def micro(self, iteration: int, index: int) -> list[Row]:
        """This rank's rows of one micro-batch."""
        start = (index * self.world + self.rank) * self.batch_size
        return self._rows(iteration, range(start, start + self.batch_size))

    def _rows(self, iteration: int, positions: range) -> list[Row]:
        epoch, step = divmod(iteration, self.steps_per_epoch)
        places = self._epoch(epoch)[step]
        return [
            self._row(
                epoch, *places[position % len(places)], position, 1.0 / len(places) if position < len(places) else 0.0
            )
            for position in positions
        ]

    def _row(self, epoch: int, index: int, repeat: int, position: int, weight: float) -> Row:
        item = self.items[index]
        what = (self.seed, epoch, item.key, repeat)
        return Row(
            item,
            position,
            weight,
            flip=draw("flip", *what) % len(item.image_keys) == 1,
            variant=draw("variant", *what) % len(item.text_keys),
            dropout=fraction("dropout", *what) < item.dropout_rate,
        )

    def _epoch(self, epoch: int) -> list[list[tuple[int, int]]]:
        """The (item, repeat) pairs of each effective batch of an epoch, without filling."""
        batches = self._epochs.get(epoch)
        if batches is None:  # each line is safe beside another thread that does the same: loader workers have one
            for oldest in sorted(self._epochs)[: 1 - NUM_EPOCHS_KEPT]:
                self._epochs.pop(oldest, None)
            batches = self._epochs[epoch] = self._shuffled(epoch)
        return batches

    def _shuffled(self, epoch: int) -> list[list[tuple[int, int]]]:
        size = self.effective_batch
        batches = []
        for bucket, places in sorted(self._places.items()):
            ordered = sorted(places, key=lambda place: self._order(epoch, *place))
            starts = range(0, len(ordered), size)
            batches += [(draw("batch", self.seed, epoch, *bucket, at), ordered[at : at + size]) for at in starts]
        ordered_batches = [batch for _, batch in sorted(batches)]
        if epoch == 0:
            largest = max(range(len(ordered_batches)), key=lambda number: self._area(ordered_batches[number]))
            ordered_batches.insert(0, ordered_batches.pop(largest))
        return ordered_batches

    def _area(self, batch: list[tuple[int, int]]) -> tuple[int, Size]:
        """What the memory that a batch needs grows with (all have as many rows); the size decides where areas agree."""
        height, width = self.items[batch[0][0]].geometry.target_hw
        return height * width, (height, width)

    def _order(self, epoch: int, index: int, repeat: int) -> int:
        return draw("order", self.seed, epoch, self.items[index].key, repeat)
