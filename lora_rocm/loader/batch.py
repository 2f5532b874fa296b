"""The data of one micro-batch in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lora_rocm.dataset.shape import SampleShape


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows in the host's memory.

    tensors: contiguous tensors with leading dimension B: the cached tensors, the family's ``sample_meta``, and "weight"
        (float32, shape [B]).
    fingerprints: a fingerprint per row for each tensor (int64, shape [B]). For cached tensors, they are from encoding.
    sample_keys: key of each row's sample.
    positions: index of each row in the update.
    shape: the shape that all rows have.
    shares: ``Item.share`` of each row.
    iteration: number of the update.
    micro: index of the micro-batch among this rank's micro-batches of the update.
    is_last: whether it is this rank's last micro-batch of the update.
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
    """Split a batch into up to ``parts`` batches. Each row keeps its weight, so the sum of the losses is the same."""
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
