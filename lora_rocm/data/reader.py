"""What is read for one micro-batch: cache keys in, CPU tensors out. All of it travels to and from worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_rocm.data.cache import LatentCache
from lora_rocm.data.entries import CacheEntryBad
from lora_rocm.data.plan import BatchPlan

if TYPE_CHECKING:
    from lora_rocm.families.base import TensorSpec


@dataclass(frozen=True)
class Order:
    """What to read for one micro-batch: cache keys, one a row, by kind of entry."""

    iteration: int
    micro: int
    keys: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Read:
    """What was read: tensors with a leading B, and their fingerprints [B]."""

    order: Order
    tensors: dict[str, Tensor]
    fingerprints: dict[str, Tensor]


@dataclass(frozen=True)
class BadEntry:
    """Why it could not be read. A value, not an exception: it has to travel from a worker process."""

    kind: str
    key: str
    reason: str


class Reader:
    """A map-style dataset from orders to tensors; lives in the worker process where there is one."""

    def __init__(self, cache: LatentCache, specs: Mapping[str, Mapping[str, TensorSpec]]) -> None:
        self.cache, self.specs = cache, specs

    def __getitem__(self, order: Order) -> Read | BadEntry:
        tensors: dict[str, Tensor] = {}
        fingerprints: dict[str, Tensor] = {}
        for kind, keys in order.keys.items():
            items = []
            for key in keys:
                try:
                    items.append(self.cache.get(kind, key, self.specs[kind]))
                except CacheEntryBad as error:
                    return BadEntry(kind, key, str(error))
            for name in self.specs[kind]:
                tensors[name] = torch.stack([item.tensors[name] for item in items])
                fingerprints[name] = torch.tensor([item.fingerprints[name] for item in items], dtype=torch.int64)
        return Read(order, tensors, fingerprints)


@dataclass(frozen=True)
class Orders:
    """The orders of a plan, counted in micro-batches from its beginning; iterated in the main process only."""

    plan: BatchPlan
    first: int
    end: int | None

    def after(self, count: int) -> Orders:
        """These without the first ``count``."""
        return Orders(self.plan, self.first + count, self.end)

    def __iter__(self) -> Iterator[Order]:
        number = self.first
        while number != self.end:
            iteration, micro = divmod(number, self.plan.accumulation)
            rows = self.plan.micro(iteration, micro)
            keys = {"image": tuple(row.image_key for row in rows), "text": tuple(row.text_key for row in rows)}
            yield Order(iteration, micro, keys)
            number += 1
