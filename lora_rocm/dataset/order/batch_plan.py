"""Assigns samples to updates, as a pure function of (seed, epoch). Needs no torch.

A bucket contains samples of one shape and one batch size, because a source may set a smaller batch size. All samples
of a micro-batch are from one bucket. An epoch is a shuffled list of the micro-batches of all buckets. An update takes
the next ``accumulation`` x ranks micro-batches of any bucket; the last update of an epoch takes the remaining ones. So
an update has the same samples on one GPU that accumulates 8 micro-batches and on four that accumulate 2. Other
trainers do the same: kohya-ss/sd-scripts buckets micro-batches in ``train_util.BucketManager``, and accelerate
accumulates the next micro-batches of any shape.

Incomplete micro-batches are padded with rows of weight 0, so shapes never change. The first micro-batch of training has
the most expensive shape. So running out of memory shows at once, and the allocator's first blocks are large enough for
all later batches.

Texts of different lengths may need a mask in a micro-batch. In this case, the samples of a bucket are ordered so that
as many micro-batches as possible have texts of one length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, product
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lora_rocm.dataset.images.buckets import Geometry
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.foundation.seeds import draw, drawer, fraction

NUM_EPOCHS_KEPT = 2  # prefetch reaches the next epoch before the training loop does


Grid = tuple[tuple[str, ...], ...]
"""Cache keys of a sample for one kind of entry: a tuple per view, with a key per caption. The empty caption is last.

Entries that are not encoded from an image have one view. Entries that are not encoded from a caption have one key per
view.
"""


@dataclass(frozen=True)
class Item:
    """One sample to train on.

    key: key of the ``Sample``.
    keys: cache keys by name of the family's entry.
    num_views: number of the image's views; 2 with only flip_aug (the image and its mirror image).
    num_captions: number of caption variants, without the empty caption.
    dropout_rate: probability that the empty caption replaces a variant.
    loss_weight: factor of the sample's loss.
    share: number of positions over which the loss is averaged, if it determines the sample's weight; else 1.
    geometry: scaling and crop of the image; None if the family reads no image.
    crops: geometry of each view; empty if all views have the same geometry.
    content: cache keys that identify the data independently of how it was encoded.
    batch_size: maximum number of samples in a micro-batch, as set by the source; 0 to use the run's batch size.
    lengths: a number per caption that grows with the caption's length; the empty caption is last. Captions with
        different numbers need a mask if they are in one batch. Empty if captions never need a mask.
    """

    key: str
    shape: SampleShape
    keys: Mapping[str, Grid]
    num_views: int = 1
    num_captions: int = 1
    dropout_rate: float = 0.0
    repeats: int = 1
    loss_weight: float = 1.0
    share: int = 1
    geometry: Geometry | None = None
    content: tuple[tuple[str, ...], ...] = ()
    crops: tuple[Geometry, ...] = ()
    lengths: tuple[int, ...] = ()
    batch_size: int = 0


@dataclass(frozen=True)
class Row:
    """One sample in one update.

    position: index in the update, which determines the noise.
    weight: factor of the sample's loss in the update.
    view: index of the image's view.
    """

    item: Item
    position: int
    weight: float
    view: int
    variant: int
    dropout: bool

    def key(self, entry: str) -> str:
        """Return the cache key for this row's view and caption. ``entry``: name of the family's entry."""
        views = self.item.keys[entry]
        captions = views[self.view] if len(views) > 1 else views[0]
        if len(captions) == 1:
            return captions[0]
        return captions[-1] if self.dropout else captions[self.variant]

    @property
    def geometry(self) -> Geometry | None:
        """Scaling and crop of this row's view; None if the family reads no image."""
        return self.item.crops[self.view] if self.item.crops else self.item.geometry


@dataclass(frozen=True)
class TextLengths:
    """``Item.lengths`` of N items in one array.

    count_N: number of lengths of each item.
    length_L: the lengths of all items, one item after another.
    dropout_N: ``Item.dropout_rate`` of each item.
    """

    count_N: NDArray[np.int64]
    length_L: NDArray[np.int64]
    dropout_N: NDArray[np.float64]


@dataclass(frozen=True)
class Outline:
    """The facts about N items that determine their order.

    keys: sample keys; must allow a new iteration in each epoch.
    shapes: the distinct shapes of the items.
    shape_N: index of each item's shape in ``shapes``.
    repeats_N: number of times that an epoch uses each item.
    share_N: ``Item.share`` of each item.
    batch_N: ``Item.batch_size`` of each item.
    texts: lengths of the captions; None if captions never need a mask.
    """

    keys: Iterable[str]
    shapes: Sequence[SampleShape]
    shape_N: NDArray[np.int64]
    repeats_N: NDArray[np.int64]
    share_N: NDArray[np.int32]
    batch_N: NDArray[np.int64]
    texts: TextLengths | None = None


@runtime_checkable
class Outlined(Protocol):
    """A list of items that are built on access. It can return its outline without building them.

    Building a million items for the outline would take most of the start-up time.
    """

    def outline(self) -> Outline: ...


def outline_of(items: Sequence[Item]) -> Outline:
    """Return the outline of the items, in the same order."""
    if isinstance(items, Outlined):
        return items.outline()
    numbers: dict[SampleShape, int] = {}
    found = (numbers.setdefault(item.shape, len(numbers)) for item in items)
    shape_N = np.fromiter(found, np.int64, len(items))
    repeats_N = np.fromiter((item.repeats for item in items), np.int64, len(items))
    share_N = np.fromiter((item.share for item in items), np.int32, len(items))
    batch_N = np.fromiter((item.batch_size for item in items), np.int64, len(items))
    return Outline([item.key for item in items], tuple(numbers), shape_N, repeats_N, share_N, batch_N, _texts_of(items))


def _texts_of(items: Sequence[Item]) -> TextLengths | None:
    count_N = np.fromiter((len(item.lengths) for item in items), np.int64, len(items))
    if not count_N.any():
        return None
    length_L = np.fromiter(chain.from_iterable(item.lengths for item in items), np.int64)
    return TextLengths(count_N, length_L, np.fromiter((item.dropout_rate for item in items), np.float64, len(items)))


def num_batches(counts: Iterable[int], size: int) -> int:
    """Return the number of batches if each bucket is cut into batches of up to ``size`` samples.

    ``counts``: number of samples per bucket.
    """
    return sum(-(-count // size) for count in counts)


def num_updates(num_micro_batches: int, per_update: int) -> int:
    """Return the number of updates per epoch. The last update may have fewer than ``per_update`` micro-batches."""
    return -(-num_micro_batches // per_update)


@dataclass(frozen=True)
class _Epoch:
    """The order of one epoch.

    samples_P: its P sample numbers, grouped by bucket.
    batches_S: its S batch numbers, in the order of training.
    """

    samples_P: NDArray[np.int64]
    batches_S: NDArray[np.int64]


class BatchPlan:
    """Determines which samples each update trains on, and in which order.

    The P samples of an epoch are numbered item by item, one number per repeat. Two permutations are stored per epoch:
    the sample numbers, grouped by bucket, and the S batches into which the buckets are cut. Batch boundaries are the
    same in every epoch. A batch is one micro-batch, or a whole update with ``one_bucket_updates``.

    Args:
        items: items with unique keys, in an order that is the same at every start. Not copied, because there may be
            many.
        batch_size: samples per micro-batch.
        accumulation: micro-batches per update on each rank.
        seed: seed of the order, mirroring, caption variants and dropout.
        world: number of ranks.
        rank: this rank.
        by_length: whether to group captions of one length into micro-batches, if mixed lengths need a mask.
        one_bucket_updates: whether to use the order of earlier versions, which did not store it in checkpoints. All
            micro-batches of an update come from one bucket, and missing samples are padded. With one micro-batch per
            update, both orders are the same.
    """

    def __init__(
        self,
        items: Sequence[Item],
        batch_size: int,
        accumulation: int,
        seed: int,
        world: int = 1,
        rank: int = 0,
        by_length: bool = True,
        one_bucket_updates: bool = False,
    ) -> None:
        self.items, self.batch_size, self.accumulation = items, batch_size, accumulation
        self.seed, self.world, self.rank, self.by_length = seed, world, rank, by_length
        self.one_bucket_updates = one_bucket_updates
        self._micros_per_batch = accumulation * world if one_bucket_updates else 1
        # Number the samples item by item, one per repeat.
        outline = outline_of(items)
        self._keys, self._repeats_N, self._share_N = outline.keys, outline.repeats_N, outline.share_N
        self._texts = outline.texts if by_length and batch_size > 1 else None
        self._firsts_N = np.cumsum(self._repeats_N) - self._repeats_N  # first sample number of each item
        # Assign each sample to its bucket and cut the buckets into batches.
        shapes = sorted(outline.shapes, key=lambda shape: shape.axes)
        bucket_of = np.array([shapes.index(shape) for shape in outline.shapes], dtype=np.int32)
        own_N = np.where(outline.batch_N > 0, np.minimum(outline.batch_N, batch_size), batch_size)
        sizes, size_N = np.unique(own_N, return_inverse=True)
        bucket_N = bucket_of[outline.shape_N] * np.int32(max(len(sizes), 1)) + size_N.astype(np.int32)
        self._bucket_P = np.repeat(bucket_N, self._repeats_N)
        ends = list(accumulate(np.bincount(self._bucket_P, minlength=len(shapes) * len(sizes)).tolist(), initial=0))
        self._buckets: list[tuple[SampleShape, range]] = [  # each with its batch starts
            (shape, range(start, end, size * self._micros_per_batch))
            for (shape, size), (start, end) in zip(product(shapes, sizes.tolist()), pairwise(ends), strict=True)
            if start < end
        ]
        bounds = chain(*(starts for _, starts in self._buckets), ends[-1:])
        self._bounds_S1 = np.fromiter(bounds, np.int64)  # batch n: from bounds[n] to bounds[n + 1]
        self._epochs: dict[int, _Epoch] = {}
        self._latest: tuple[tuple[int, int], tuple[list[list[tuple[int, int]]], int]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of updates per epoch."""
        return num_updates(self._num_micros, self.accumulation * self.world)

    @property
    def one_bucket_steps(self) -> int:
        """Number of updates per epoch in earlier versions, where all samples of an update came from one bucket."""
        per_update = self.accumulation * self.world // self._micros_per_batch
        return sum(num_batches([len(range(of.start, of.stop))], of.step * per_update) for _, of in self._buckets)

    @property
    def _num_micros(self) -> int:
        """Number of micro-batches per epoch, summed over all ranks."""
        return (len(self._bounds_S1) - 1) * self._micros_per_batch

    def rows(self, iteration: int) -> list[Row]:
        """Return all rows of one update, for all ranks. ``iteration``: number of the update, from 0.

        A row's weight is ``loss_weight`` times ``Item.share``, divided by the sum of ``Item.share`` over the
        update's samples.
        """
        epoch, step = divmod(iteration, self.steps_per_epoch)
        return self._rows(epoch, step, range(self._micros_of(step)))

    def micro(self, iteration: int, index: int) -> list[Row]:
        """Return this rank's rows of one micro-batch.

        If an update has no micro-batch for this rank, the rank repeats another rank's micro-batch with weight 0.

        Args:
            iteration: number of the update, from 0.
            index: index of the micro-batch on this rank, below ``num_micros``.
        """
        epoch, step = divmod(iteration, self.steps_per_epoch)
        own = self._own_micros(epoch, step)
        if own:
            return self._rows(epoch, step, own[index : index + 1])
        return [replace(row, weight=0.0) for row in self._rows(epoch, step, range(1))]

    def num_micros(self, iteration: int) -> int:
        """Return the number of this rank's micro-batches in one update: at least 1, at most ``accumulation``."""
        return max(1, len(range(self.rank, self._micros_of(iteration % self.steps_per_epoch), self.world)))

    def first_micro(self, iteration: int) -> int:
        """Return how many micro-batches this rank processes before an update.

        This is also the number of the update's first micro-batch. ``place_of`` converts it back.
        """
        epoch, step = divmod(iteration, self.steps_per_epoch)
        return epoch * self._micros_per_epoch + step * self.accumulation

    def place_of(self, number: int) -> tuple[int, int]:
        """Return (iteration, index) of this rank's micro-batch ``number``, counted from 0 over the whole training."""
        epoch, rest = divmod(number, self._micros_per_epoch)
        step, index = divmod(rest, self.accumulation)  # only the last update of an epoch is shorter
        return epoch * self.steps_per_epoch + step, index

    @property
    def _micros_per_epoch(self) -> int:
        """Number of this rank's micro-batches per epoch."""
        return (self.steps_per_epoch - 1) * self.accumulation + self.num_micros(self.steps_per_epoch - 1)

    def _micros_of(self, step: int) -> int:
        """Return the number of micro-batches in one update of an epoch, summed over all ranks."""
        whole = self.accumulation * self.world
        return min(whole, self._num_micros - step * whole)

    def _own_micros(self, epoch: int, step: int) -> Sequence[int]:
        """Return which of an update's micro-batches this rank processes, as indices in the update.

        With several ranks, micro-batches are dealt out in turn, the most expensive first, so that all ranks have a
        similar amount of work.
        """
        micros = range(self._micros_of(step))
        if self.world == 1 or self.one_bucket_updates:
            return micros[self.rank :: self.world]
        first = step * self.accumulation * self.world
        starts_M = self._bounds_S1[self._epoch(epoch).batches_S[first : first + len(micros)]]
        buckets_M = np.searchsorted(self._bucket_starts, starts_M, side="right") - 1
        costs = [self._buckets[bucket][0].order for bucket in buckets_M.tolist()]
        return sorted(micros, key=costs.__getitem__, reverse=True)[self.rank :: self.world]

    @cached_property
    def _bucket_starts(self) -> NDArray[np.int64]:
        return np.fromiter((starts.start for _, starts in self._buckets), np.int64)

    def _rows(self, epoch: int, step: int, micros: Iterable[int]) -> list[Row]:
        """Return the rows of an update's micro-batches with the indices ``micros``."""
        batches, whole = self._samples(epoch, step)
        rows = list[Row]()
        for micro in micros:
            number, at = divmod(micro, self._micros_per_batch)
            samples, first = batches[number], at * self.batch_size
            for place in range(first, first + self.batch_size):
                per_share = 1.0 / whole if place < len(samples) else 0.0
                position = micro * self.batch_size + place - first
                rows.append(self._row(epoch, *samples[place % len(samples)], position, per_share))
        return rows

    def _row(self, epoch: int, index: int, repeat: int, position: int, per_share: float) -> Row:
        item = self.items[index]
        what = (self.seed, epoch, item.key, repeat)
        return Row(
            item,
            position,
            per_share * item.share * item.loss_weight,
            view=draw("flip", *what) % item.num_views,
            variant=draw("variant", *what) % item.num_captions,
            dropout=fraction("dropout", *what) < item.dropout_rate,
        )

    def _samples(self, epoch: int, step: int) -> tuple[list[list[tuple[int, int]]], int]:
        """Return the samples of an update, without padding.

        The latest result is stored, because each micro-batch of the update needs it.

        Returns:
            For each batch, a list of (item index, repeat), and the sum of the samples' shares.
        """
        latest = self._latest
        if latest is not None and latest[0] == (epoch, step):
            return latest[1]
        order, per_update = self._epoch(epoch), self.accumulation * self.world // self._micros_per_batch
        batches, whole = list[list[tuple[int, int]]](), 0
        for batch in order.batches_S[step * per_update : (step + 1) * per_update].tolist():
            samples = order.samples_P[self._bounds_S1[batch] : self._bounds_S1[batch + 1]]
            items = np.searchsorted(self._firsts_N, samples, side="right") - 1
            batches.append(list(zip(items.tolist(), (samples - self._firsts_N[items]).tolist(), strict=True)))
            whole += int(self._share_N[items].sum())
        self._latest = (epoch, step), (batches, whole)  # one assignment: a loader thread may do the same
        return batches, whole

    def _epoch(self, epoch: int) -> _Epoch:
        """Return the order of an epoch. It is computed once; the last NUM_EPOCHS_KEPT epochs are stored."""
        found = self._epochs.get(epoch)
        if found is None:  # each line is thread-safe: a loader thread may do the same
            for oldest in sorted(self._epochs)[: 1 - NUM_EPOCHS_KEPT]:
                self._epochs.pop(oldest, None)
            found = self._epochs[epoch] = self._shuffled(epoch)
        return found

    def _shuffled(self, epoch: int) -> _Epoch:
        """Draw the order of an epoch. Epoch 0 starts with a batch of the most expensive shape."""
        drawn_P, drawn_S = self._sample_draws(epoch), self._batch_draws(epoch)
        batches_S = np.argsort(drawn_S, kind="stable")
        if epoch == 0:
            largest = max(self._buckets, key=lambda bucket: bucket[0].order)[1]  # its batches need the most memory
            starts_S = self._bounds_S1[batches_S]
            at = int(np.flatnonzero((starts_S >= largest.start) & (starts_S < largest.stop))[0])
            batches_S[: at + 1] = np.roll(batches_S[: at + 1], 1)
        if self._texts is None:
            return _Epoch(np.lexsort((drawn_P, self._bucket_P)), batches_S)
        length_P = self._drawn_lengths(epoch, self._texts)
        return _Epoch(_in_batches_of_one_length(self._bucket_P, length_P, drawn_P, self.batch_size), batches_S)

    def _drawn_lengths(self, epoch: int, texts: TextLengths) -> NDArray[np.int64]:
        """Return the caption length of each sample in an epoch. The captions are drawn as in ``_row``. Shape [P]."""
        firsts_N, variants_N = np.cumsum(texts.count_N) - texts.count_N, texts.count_N - 1
        item_P = np.repeat(np.arange(len(firsts_N)), self._repeats_N)
        caption_P = np.zeros(len(item_P), np.int64)
        if (variants_N > 1).any():
            caption_P += (self._sample_draws(epoch, "variant") % variants_N[item_P].astype(np.uint64)).astype(np.int64)
        if texts.dropout_N.any():
            fraction_P = (self._sample_draws(epoch, "dropout") >> np.uint64(11)) / 2**53
            caption_P = np.where(fraction_P < texts.dropout_N[item_P], variants_N[item_P], caption_P)
        length_P: NDArray[np.int64] = texts.length_L[firsts_N[item_P] + caption_P]
        return length_P

    def _sample_draws(self, epoch: int, purpose: str = "order") -> NDArray[np.uint64]:
        number, counts = drawer(purpose, self.seed, epoch), self._repeats_N.tolist()
        drawn = (number(key, repeat) for key, count in zip(self._keys, counts, strict=True) for repeat in range(count))
        return np.fromiter(drawn, np.uint64, len(self._bucket_P))

    def _batch_draws(self, epoch: int) -> NDArray[np.uint64]:
        number, usual = drawer("batch", self.seed, epoch), self.batch_size * self._micros_per_batch
        drawn = (
            number(*shape.sizes, start - starts.start, *(() if starts.step == usual else (starts.step,)))
            for shape, starts in self._buckets
            for start in starts
        )
        return np.fromiter(drawn, np.uint64, len(self._bounds_S1) - 1)


def _in_batches_of_one_length(
    bucket_P: NDArray[np.int32], length_P: NDArray[np.int64], drawn_P: NDArray[np.uint64], batch_size: int
) -> NDArray[np.int64]:
    """Group the P sample numbers by bucket, so that most micro-batches have texts of one length.

    In each bucket, micro-batches of one length come first, in random order, with randomly chosen samples. The remaining
    samples follow, sorted by length; there are fewer than ``batch_size`` of each length. If all lengths are equal, the
    samples are sorted by ``drawn_P``.

    Args:
        bucket_P: bucket of each sample.
        length_P: caption length of each sample.
        drawn_P: random number of each sample.
        batch_size: samples per micro-batch.

    Returns:
        The sample numbers in the new order. Shape [P].
    """
    order_P, number_P = np.lexsort((drawn_P, length_P, bucket_P)), np.arange(len(bucket_P))
    bucket_P, length_P, drawn_P = bucket_P[order_P], length_P[order_P], drawn_P[order_P]
    begins_P = np.ones(len(order_P), bool)  # a group of samples of one bucket and length
    begins_P[1:] = (np.diff(bucket_P) != 0) | (np.diff(length_P) != 0)
    starts_G = np.flatnonzero(begins_P)
    sizes_G = np.diff(starts_G, append=len(order_P))
    place_P = number_P - np.repeat(starts_G, sizes_G)  # in the group
    left_P = place_P >= np.repeat(sizes_G - sizes_G % batch_size, sizes_G)
    first_P = number_P - place_P % batch_size  # of the same micro-batch
    return order_P[np.lexsort((np.where(left_P, 0, drawn_P[first_P]), left_P, bucket_P))]
