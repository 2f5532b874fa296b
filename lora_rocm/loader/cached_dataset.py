"""Reads one micro-batch from the cache: a dataset that gets cache keys and returns CPU tensors.

Both are sent between the main process and worker processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rocm.cache_store.entry_file import CacheEntryBad
from lora_rocm.dataset.entry_spec import EntrySpec, TensorSpec
from lora_rocm.dataset.order.batch_plan import BatchPlan
from lora_rocm.device.transfer import fingerprint
from lora_rocm.encoded_cache.cache import LatentCache


@dataclass(frozen=True)
class Order:
    """A request to read one micro-batch.

    keys: for each kind of entry, one cache key per row.
    """

    iteration: int
    micro: int
    keys: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Read:
    """The micro-batch that was read for an order.

    tensors: the tensors by name, with leading dimension B.
    fingerprints: the fingerprints of each tensor's rows. Shape [B].
    """

    order: Order
    tensors: dict[str, Tensor]
    fingerprints: dict[str, Tensor]


@dataclass(frozen=True)
class BadEntry:
    """A cache entry that could not be read. It is not an exception, because worker processes send it as a result."""

    kind: str
    key: str
    reason: str


@dataclass(frozen=True)
class Unequal:
    """Error result: tensors of one batch differ in size, and their specification has no ``Pad`` that allows this."""

    entry: str
    tensor: str
    sizes: tuple[tuple[int, ...], ...]


class CachedDataset:
    """A map-style dataset that reads the tensors of an order. It runs in the worker process if there is one."""

    def __init__(self, cache: LatentCache, entries: Sequence[EntrySpec]) -> None:
        self.cache, self.entries = cache, {entry.name: entry for entry in entries}

    def __getitem__(self, order: Order) -> Read | BadEntry | Unequal:
        tensors: dict[str, Tensor] = {}
        fingerprints: dict[str, Tensor] = {}
        for name, keys in order.keys.items():
            found, items = self.entries[name].tensors, []
            for key in keys:
                try:
                    items.append(self.cache.get(name, key, found))
                except CacheEntryBad as error:
                    return BadEntry(name, key, str(error))
            for tensor, spec in found.items():
                rows = [item.tensors[tensor] for item in items]
                if spec.if_padded and len({row.shape for row in rows}) == 1:
                    continue
                stacked = together(rows, [item.fingerprints[tensor] for item in items], spec)
                if stacked is None:
                    return Unequal(name, tensor, tuple(tuple(row.shape) for row in rows))
                tensors[tensor], fingerprints[tensor] = stacked
        return Read(order, tensors, fingerprints)


def together(rows: Sequence[Tensor], fingerprints: Sequence[int], spec: TensorSpec) -> tuple[Tensor, Tensor] | None:
    """Stack the tensors of several samples. If their sizes differ, they are padded along the axis of ``Pad``.

    A padded row gets a new fingerprint of its padded bytes. Its cached bytes were already verified when they were read.

    Args:
        rows: the tensor of each sample.
        fingerprints: the fingerprint of each tensor.
        spec: specification of the tensors, with their padding.

    Returns:
        The stacked tensor and its fingerprints (shape [B]); None if the sizes differ in an axis that is not padded.
    """
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows)), torch.tensor(fingerprints, dtype=torch.int64)
    if spec.pad is None:
        return None
    axis = spec.dims.index(spec.pad.axis)
    if len({row.shape[:axis] + row.shape[axis + 1 :] for row in rows}) > 1:
        return None
    sizes = [row.shape[axis] for row in rows]
    longest = math.lcm(*sizes) if spec.pad.repeats else max(sizes)
    padded_B = rows[0].new_full((len(rows), *rows[0].shape[:axis], longest, *rows[0].shape[axis + 1 :]), spec.pad.value)
    sums = list(fingerprints)
    for number, row in enumerate(rows):
        copies = longest // row.shape[axis] if spec.pad.repeats else 1
        padded_B[number].narrow(axis, 0, copies * row.shape[axis]).copy_(torch.cat([row] * copies, dim=axis))
        if row.shape[axis] < longest:
            sums[number] = int(fingerprint(padded_B[number : number + 1]))
    return padded_B, torch.tensor(sums, dtype=torch.int64)


@dataclass(frozen=True)
class Orders:
    """The orders for a plan's micro-batches, from number ``first`` up to, but not including, ``end``.

    If ``end`` is None, they are endless. Only the main process iterates over them.
    """

    plan: BatchPlan
    first: int
    end: int | None

    def after(self, count: int) -> Orders:
        """Return the same orders without the first ``count``."""
        return Orders(self.plan, self.first + count, self.end)

    def __iter__(self) -> Iterator[Order]:
        number = self.first
        while number != self.end:
            iteration, micro = self.plan.place_of(number)
            rows = self.plan.micro(iteration, micro)
            keys = {entry: tuple(row.key(entry) for row in rows) for entry in rows[0].item.keys}
            yield Order(iteration, micro, keys)
            number += 1
