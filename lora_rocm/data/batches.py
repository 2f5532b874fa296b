"""Checked batches on the host, read from the caches in the order of the plan by a plain DataLoader.

A worker process gets a list of cache keys and gives back CPU tensors; it knows neither the plan nor the family.
Pinning is done here, in the main process: the DataLoader's pin thread would be one more thing that can hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lora_rocm.data.cache import LatentCache
from lora_rocm.data.entries import CacheEntryBad
from lora_rocm.data.plan import BatchPlan, Item, Row
from lora_rocm.data.prepare import Facts, Prepared, prepare
from lora_rocm.device.transfer import fingerprint
from lora_rocm.errors import DataError, MachineError, StorageError

if TYPE_CHECKING:
    from lora_rocm.families.base import ModelFamily, TensorSpec
    from lora_rocm.recipe.schema import RuntimeSection

__all__ = ["Batch", "BatchPlan", "Facts", "Item", "Prepared", "Row", "loader", "prepare"]

Batch = dict[str, Any]
"""One micro-batch on the host, B rows:

tensors: dict[str, Tensor], leading B, contiguous: the cached tensors, the family's ``sample_meta``, "weight" (float32).
fingerprints: dict[str, Tensor], int64 [B], for each of them; of cached tensors the one computed when they were encoded.
sample_keys: list[str]. positions: list[int], index in the effective batch. bucket: (height, width) in pixels.
iteration, micro: int, its address.
"""

Repair = Callable[[str, str, str], None]


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


def loader(
    plan: BatchPlan,
    cache: LatentCache,
    family: ModelFamily,
    start_iteration: int,
    num_iterations: int | None,
    runtime: RuntimeSection,
    *,
    pin_memory: bool = False,
    repair: Repair | None = None,
) -> Iterator[Batch]:
    """The micro-batches of this rank, from ``start_iteration`` on, in order; without end where the number is None.

    A bad cache entry is made again by ``repair`` (``Prepared.repair``), in this process, and reading goes on there.

    Raises:
        DataError: a bad cache entry, and no ``repair``.
        StorageError: an entry is bad again after it was repaired.
        MachineError: a worker process stalled or died.
    """
    reader = Reader(cache, {encoder.kind: encoder.outputs for encoder in family.encoders()})
    address, repaired = (start_iteration, 0), set[tuple[str, str]]()
    end = None if num_iterations is None else start_iteration + num_iterations
    while address[0] != end:
        for read in _reads(reader, _Orders(plan, address, end), runtime):
            if isinstance(read, BadEntry):
                _repair(read, repair, repaired)
                break
            yield _finished(read, plan, family, pin_memory)
            address = _next(address, plan.accumulation)


class _Orders:
    """The orders of a plan from one address to the end; iterated in the main process only."""

    def __init__(self, plan: BatchPlan, first: tuple[int, int], end: int | None) -> None:
        self.plan, self.first, self.end = plan, first, end

    def __iter__(self) -> Iterator[Order]:
        iteration, micro = self.first
        while iteration != self.end:
            rows = self.plan.micro(iteration, micro)
            keys = {"image": tuple(row.image_key for row in rows), "text": tuple(row.text_key for row in rows)}
            yield Order(iteration, micro, keys)
            iteration, micro = _next((iteration, micro), self.plan.accumulation)


def _next(address: tuple[int, int], accumulation: int) -> tuple[int, int]:
    iteration, micro = address
    return (iteration, micro + 1) if micro + 1 < accumulation else (iteration + 1, 0)


def _reads(reader: Reader, orders: _Orders, runtime: RuntimeSection) -> Iterator[Read | BadEntry]:
    """Run the orders through a DataLoader, which keeps them in order however many workers there are."""
    generator = torch.Generator().manual_seed(0)  # else it draws from the global generator, which others rely on
    with_workers: dict[str, Any] = {}  # refused without workers
    if runtime.workers:
        with_workers = {
            "multiprocessing_context": "spawn",
            "timeout": runtime.worker_timeout_s,
            "worker_init_fn": _limit_threads,
        }
    batches = iter(
        DataLoader(
            reader,
            batch_size=None,
            sampler=orders,
            num_workers=runtime.workers,
            collate_fn=_as_read,
            generator=generator,
            **with_workers,
        )
    )
    while True:
        try:
            read = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if not runtime.workers:
                raise
            raise MachineError(
                "loader-worker",
                f"A loader worker process stalled or died: {error}",
                where=f"runtime.workers: {runtime.workers}, runtime.worker_timeout_s: {runtime.worker_timeout_s:g}",
                fix="Set runtime.workers: 0 (the default), and run again with --resume latest.",
            ) from error
        yield read


def _limit_threads(worker_id: int) -> None:
    torch.set_num_threads(1)


def _as_read(read: Read | BadEntry) -> Read | BadEntry:
    return read


def _repair(bad: BadEntry, repair: Repair | None, repaired: set[tuple[str, str]]) -> None:
    """Have an entry made again, once.

    Raises:
        DataError: nobody can make it.
        StorageError: it was made again before.
    """
    if repair is None:
        raise DataError(
            "cache-entry-damaged",
            "A cache entry is damaged.",
            where=bad.reason,
            fix="Delete that file and run the same command again.",
        )
    if (bad.kind, bad.key) in repaired:
        raise StorageError(
            "cache-entry-damaged",
            "A cache entry is damaged again right after it was made again.",
            where=bad.reason,
            fix="Check the disk, or set cache.dir to a folder on another one.",
        )
    repair(bad.kind, bad.key, bad.reason)
    repaired.add((bad.kind, bad.key))


def _finished(read: Read, plan: BatchPlan, family: ModelFamily, pin_memory: bool) -> Batch:
    """Add what is computed, not cached: the family's meta tensors and the weights."""
    order = read.order
    rows = plan.micro(order.iteration, order.micro)
    computed = _meta(rows, family)
    computed["weight"] = torch.tensor([row.weight for row in rows], dtype=torch.float32)
    fingerprints = {**read.fingerprints, **{name: fingerprint(tensor) for name, tensor in computed.items()}}
    tensors = {**read.tensors, **computed}
    if pin_memory:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return {
        "tensors": tensors,
        "fingerprints": fingerprints,
        "sample_keys": [row.item.key for row in rows],
        "positions": [row.position for row in rows],
        "bucket": rows[0].item.geometry.target_hw,
        "iteration": order.iteration,
        "micro": order.micro,
    }


def _meta(rows: Sequence[Row], family: ModelFamily) -> dict[str, Tensor]:
    cuts = [row.item.geometry for row in rows]
    metas = [family.sample_meta(cut.original_hw, cut.crop_top_left, cut.target_hw) for cut in cuts]
    return {name: torch.stack([meta[name] for meta in metas]) for name in metas[0]}
