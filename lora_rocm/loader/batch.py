"""One micro-batch on the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lora_rocm.dataset.shape import SampleShape


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows on the host.

    tensors: contiguous, with leading dimension B: the cached tensors, the family's ``sample_meta``, and "weight"
        (float32 [B]).
    fingerprints: int64 [B] for each tensor; for cached tensors they were computed at encoding.
    sample_keys: the sample of each row.
    positions: the index of each row in the update.
    shape: the shape of all rows.
    shares: ``Item.share`` of each row.
    iteration, micro: number of the update, and of the micro-batch within this rank's part of it.
    is_last: no micro-batch of this rank follows in the update.
    """

    tensors: dict[str, Tensor]
    fingerprints: dict[str, Tensor]
    sample_keys: tuple[str, ...]
    positions: tuple[int, ...]
    shape: SampleShape
    iteration: int
    micro: int
    is_last: bool
    shares: tuple[int, ...]


def split(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into up to ``parts`` batches. Each row keeps its weight, so the losses add up."""
    count = len(batch.positions)
    size = -(-count // parts)
    if size >= count:
        return [batch]
    return [_rows(batch, slice(first, first + size)) for first in range(0, count, size)]


def _rows(batch: Batch, rows: slice) -> Batch:
    return replace(
        batch,
        tensors={name: tensor[rows] for name, tensor in batch.tensors.items()},
        fingerprints={name: values[rows] for name, values in batch.fingerprints.items()},
        sample_keys=batch.sample_keys[rows],
        positions=batch.positions[rows],
        shares=batch.shares[rows],
    )
