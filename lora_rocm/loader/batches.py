"""Reads verified batches from the cache into host memory, in the order of the plan, with a plain DataLoader.

A worker process receives a list of cache keys and returns CPU tensors. It has access neither to the plan nor to the
model family. Memory is pinned in the main process, because the DataLoader's pin thread is one more thread that could
hang. ``loader/worker_pool.py`` handles workers that fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lora_rocm.dataset.order.batch_plan import BatchPlan, Item, Row
from lora_rocm.device.transfer import fingerprint
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.manifest import SampleStatistics
from lora_rocm.encoded_cache.prepare import Prepared, prepare
from lora_rocm.errors import DataError, StorageError
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.cached_dataset import BadEntry, CachedDataset, Orders, Read, Unequal
from lora_rocm.loader.worker_pool import LoaderWorkers
from lora_rocm.rundir.run_context import NOBODY, RunContext

if TYPE_CHECKING:
    from lora_rocm.dataset.entry_spec import EntrySpec
    from lora_rocm.families.base import EncodesSamples
    from lora_rocm.recipe.process_sections import RuntimeSection

__all__ = ["BatchPlan", "SampleStatistics", "Item", "Prepared", "Row", "loader", "open_workers", "prepare"]

Repair = Callable[[str, str, str], None]


def open_workers(
    cache: LatentCache,
    entries: Sequence[EntrySpec],
    runtime: RuntimeSection,
    context: RunContext = NOBODY,
) -> LoaderWorkers:
    """Return the workers for ``loader``. All iterators of a run share them.

    Args:
        cache: the cache to read.
        entries: the kinds of entries to read (``Prepared.entries``).
        runtime: the recipe's section with the number of workers and their time limit.
        context: receives notices about failed workers; see ``LoaderWorkers``.
    """
    return LoaderWorkers(CachedDataset(cache, entries), runtime, context)


def loader(
    plan: BatchPlan,
    family: EncodesSamples,
    workers: LoaderWorkers,
    start_iteration: int,
    num_iterations: int | None,
    *,
    pin_memory: bool = False,
    repair: Repair | None = None,
) -> Iterator[Batch]:
    """Yield this rank's micro-batches in order, beginning with the update ``start_iteration``.

    Args:
        plan: the order of training.
        family: the model family, which computes the tensors that are not cached.
        workers: the workers from ``open_workers``.
        start_iteration: number of the first update.
        num_iterations: number of updates; None for an endless iterator.
        pin_memory: whether to pin the tensors' memory.
        repair: encodes a bad cache entry again, in this process (``Prepared.repair``). Its batch is then read again.

    Raises:
        DataError: a cache entry is bad and there is no ``repair``, or tensors of one batch differ in size.
        StorageError: an entry is still bad after its repair.
    """
    end = None if num_iterations is None else plan.first_micro(start_iteration + num_iterations)
    orders, repaired = Orders(plan, plan.first_micro(start_iteration), end), set[tuple[str, str]]()
    while orders.first != end:
        for read in workers.reads(orders):
            if isinstance(read, Unequal):
                raise _unequal(read)
            if isinstance(read, BadEntry):
                _repair(read, repair, repaired)
                break
            yield _finished(read, plan, family, pin_memory)
            orders = orders.after(1)


def _unequal(read: Unequal) -> DataError:
    sizes = ", ".join(sorted({" x ".join(map(str, size)) for size in read.sizes}))
    return DataError(
        "batch-sizes-differ",
        f"The samples of one batch differ in the size of {read.tensor} ({sizes}), which this model family does not "
        "pad.",
        where=f"cache entry {read.entry}",
        fix="Set train.batch_size: 1, or use samples of equal size.",
    )


def _repair(bad: BadEntry, repair: Repair | None, repaired: set[tuple[str, str]]) -> None:
    """Encode a bad entry again, but only once per entry.

    Raises:
        DataError: there is no ``repair``.
        StorageError: the entry was already repaired before.
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
            "A cache entry is damaged again right after it was rebuilt.",
            where=bad.reason,
            fix="Check the disk, or set cache.dir to a folder on a different disk.",
        )
    repair(bad.kind, bad.key, bad.reason)
    repaired.add((bad.kind, bad.key))


def _finished(read: Read, plan: BatchPlan, family: EncodesSamples, pin_memory: bool) -> Batch:
    """Build the batch from the cached tensors and from computed ones: the family's metadata and the weights."""
    order = read.order
    rows = plan.micro(order.iteration, order.micro)
    computed = _meta(rows, family)
    computed["weight"] = torch.tensor([row.weight for row in rows], dtype=torch.float32)
    fingerprints = {**read.fingerprints, **{name: fingerprint(tensor) for name, tensor in computed.items()}}
    tensors = {**read.tensors, **computed}
    if pin_memory:
        tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    return Batch(
        tensors=tensors,
        fingerprints=fingerprints,
        sample_keys=tuple(row.item.key for row in rows),
        positions=tuple(row.position for row in rows),
        shape=rows[0].item.shape,
        iteration=order.iteration,
        micro=order.micro,
        is_last=order.micro + 1 == plan.num_micros(order.iteration),
        shares=tuple(row.item.share for row in rows),
    )


def _meta(rows: Sequence[Row], family: EncodesSamples) -> dict[str, Tensor]:
    cuts = [geometry for row in rows if (geometry := row.geometry) is not None]
    metas = [family.sample_meta(cut.original_hw, cut.crop_top_left, cut.target_hw) for cut in cuts]
    return {name: torch.stack([meta[name] for meta in metas]) for name in metas[0]} if metas else {}
