"""Update rules that treat each weight as a matrix, computed on stacks of matrices with equal shape.

A LoRA has a thousand small matrices of only a few shapes. An operation on a stack [n, r, c] takes as few kernel
launches as an operation on one matrix. The state of all stacks is concatenated into tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lora_rocm.optim.update_rule import TABLE_MULTIPLE, S, Scalars, UpdateRule, write


@dataclass(frozen=True)
class WeightStack:
    """A stack of weights with equal shape and learning rate.

    Attributes:
        places: indices of the weights in the list of all weights.
        rows, columns: size of each weight as a matrix. If a weight has more than two axes, all axes after the first are
            combined; if it has fewer, it has one row.
        learning_rate: peak learning rate.
        is_vector: whether the weights are vectors: they have one axis, or more than two with only one longer than 1
            (DoRA's magnitudes of a convolution). Always false if the rule treats vectors as matrices.
    """

    places: tuple[int, ...]
    rows: int
    columns: int
    learning_rate: float
    is_vector: bool


class StackedRule(UpdateRule[S]):
    """Base class of update rules that update one stack at a time.

    Attributes:
        tells_vectors: whether vectors are updated differently from matrices with one row.
        stacks: stacks that together contain all weights.
    """

    tells_vectors: ClassVar[bool] = False

    def _allocate(self, scalars: Scalars) -> None:
        found: dict[tuple[int, int, float, bool], list[int]] = {}
        slices = [self._weights.slice_of([name]) for name in self._weights.parameters]
        for number, (weight, place) in enumerate(zip(self._weights.parameters.values(), slices, strict=True)):
            rate = next(g.learning_rate for g in self._groups if g.place.start <= place.start < g.place.stop)
            rows = weight.shape[0] if weight.ndim > 1 else 1
            is_vector = self.tells_vectors and weight.ndim != 2 and max(weight.shape) == weight.numel()
            found.setdefault((rows, weight.numel() // rows, rate, is_vector), []).append(number)
        self.stacks = [WeightStack(tuple(places), *key) for key, places in found.items()]
        self._lengths = [place.stop - place.start for place in slices]
        self._steps = scalars.add("step")

    def _table(
        self, name: str, shape_of: Callable[[WeightStack], tuple[int, ...] | None], dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Add a table of state. Return its zero-filled parts, one tensor [n, *shape] per stack.

        ``shape_of`` returns the shape for a stack, or None if the stack needs no such state; its part is then empty.
        """
        shapes = [(0,) if (shape := shape_of(stack)) is None else (len(stack.places), *shape) for stack in self.stacks]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        total = -(-sum(sizes) // TABLE_MULTIPLE) * TABLE_MULTIPLE
        table = self._weights.masters.new_zeros(total, dtype=dtype)
        if total:
            self.tables = {**self.tables, name: table}
        parts = table.split([*sizes, total - sum(sizes)])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]

    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        hold, masters_N, steps = held > 0, self._weights.masters, self._steps + 1
        gradients = self._weights.gradients.div_(divisor).split(self._lengths)
        masters = masters_N.split(self._lengths)
        updates: dict[int, Tensor] = {}
        for number, stack in enumerate(self.stacks):
            length, size = self._lengths[stack.places[0]], stack.rows * stack.columns
            gradients_nrc, weights_nrc = (
                torch.stack([parts[place] for place in stack.places])[:, :size]
                .reshape(-1, stack.rows, stack.columns)
                .float()
                for parts in (gradients, masters)
            )
            update_nrc = self._update(number, gradients_nrc, weights_nrc, factor, steps, hold)
            update_nL = pad(update_nrc.reshape(-1, size), (0, length - size))
            updates |= zip(stack.places, update_nL.unbind(), strict=True)
        update_N = torch.cat([updates[place] for place in range(len(updates))])
        write(masters_N, torch.sub(masters_N, update_N, out=update_N), hold)
        write(self._steps, steps, hold)

    @abstractmethod
    def _update(
        self, number: int, gradients_nrc: Tensor, weights_nrc: Tensor, factor: float, steps: Tensor, hold: Tensor
    ) -> Tensor:
        """Update the state of one stack. Return the values to subtract from its weights, float32 [n, r, c].

        Args:
            number: index of the stack.
            gradients_nrc: gradients, float32; may be overwritten.
            weights_nrc: weights, float32; may be overwritten.
            factor: the schedule's factor of the learning rate.
            steps: number of this step, counted from 1, 0-d.
            hold: bool 0-d; if true, no state may change.
        """


def mean_square_root(tensor_nrc: Tensor) -> Tensor:
    """Return the root mean square of each matrix, shape [n, 1, 1]."""
    return tensor_nrc.square().mean((-2, -1), keepdim=True).sqrt_()


def factored(rows_nr: Tensor, columns_nc: Tensor) -> Tensor:
    """Return 1 / sqrt of the rank-1 matrices with these row and column means, [n, r, c] (arXiv 1804.04235)."""
    row_factor_nr = (rows_nr / rows_nr.mean(-1, keepdim=True)).rsqrt_()
    return row_factor_nr.unsqueeze(-1) * columns_nc.rsqrt().unsqueeze(-2)


def renew_means(means: Mapping[int, Tensor], squares_nrc: Tensor, share: Tensor | float, hold: Tensor) -> None:
    """Move running means towards the means of ``squares_nrc`` by ``share``, unless ``hold`` is true.

    ``means``: the running means, keyed by the axis over which they are computed.
    """
    for axis, state in means.items():
        write(state, torch.lerp(state, squares_nrc.mean(axis), share), hold)
