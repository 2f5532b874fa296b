"""What the host learns of a queued update: one tensor of numbers, read once, after the next update is queued."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Verdict(NamedTuple, Generic[T]):
    """The verdict on an update: 0-d tensors on the device while it is queued, numbers on the host.

    The flags are 0 or 1. "Own" is what this rank found; the other values are those of all ranks.
    """

    stamp: T  # iteration + 1; a kernel argument, so stale memory cannot pass for the numbers of this update
    loss: T
    grad_norm: T  # before clipping
    blocked: T  # flag: no rank made the update, and the batch is repeated
    nonfinite: T  # flag: the update was not made, as loss or gradient is not finite
    loss_scale: T
    own: T  # flag: this rank's batch or trained state has changed
    wrong: T  # flag: the sum over ranks is wrong
    guilty: T  # number of samples with a loss that is not finite; 0 with one rank
    stops: T  # number of ranks that were asked to stop; 0 with one rank
    saves: T  # flag: the first rank's clock asks for a checkpoint; 0 with one rank
    changed: T  # flag: this rank's trained state has changed
    logged: Mapping[str, T]  # values of the update rule
    measures: Mapping[str, T]  # weighted sums over this rank's samples
    losses_B: Sequence[T] | Tensor  # of this rank's samples, unweighted

    def scalars(self) -> Iterator[T]:
        """Yield all values except for the losses, in the order of ``pack``."""
        yield from self[:LOGGED]  # type: ignore[misc]
        yield from self.logged.values()
        yield from self.measures.values()


LOGGED = Verdict._fields.index("logged")


def pack(verdict: Verdict[Tensor]) -> Tensor:
    """Return one float64 tensor [scalars + B] on the device; a value that is float64 costs no kernel of its own."""
    scalars = torch.stack([value.to(torch.float64) for value in verdict.scalars()])
    return torch.cat([scalars, torch.as_tensor(verdict.losses_B)])


def unpack(values: Sequence[float], logged: Iterable[str], measures: Iterable[str]) -> Verdict[float]:
    """Return the numbers of a packed verdict. ``logged``, ``measures``: the names that it was packed with."""
    rest = iter(values)
    fixed = [next(rest) for _ in range(LOGGED)]
    named = ({name: next(rest) for name in names} for names in (logged, measures))
    return Verdict._make([*fixed, *named, list(rest)])


def means(sums: Mapping[str, float], weight: float) -> dict[str, float]:
    """Name -> mean of a measure over samples of this total weight. Those that are not finite are left out."""
    return {name: value / weight for name, value in sums.items() if weight and math.isfinite(value)}
