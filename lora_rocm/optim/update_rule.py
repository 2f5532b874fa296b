"""The interfaces of an optimizer: the update rule, its state, and the weights that it updates.

An update rule is one file. It computes weights from gradients and keeps its own state. Gating, clipping, loss scale,
EMA, state guard and checkpoints are the same for all rules (``base``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lora_rocm.errors import ResumeError
from lora_rocm.recipe.optim_sections import OptimSection

S = TypeVar("S", bound=OptimSection)


class TrainedWeights(Protocol):
    """All trained weights as flat tensors.

    Attributes:
        masters: weights that an update changes, [N].
        working: compute copy of the weights in the layers, [N]. The same tensor as ``masters`` if both dtypes are
            equal.
        parameters: views of ``masters``, keyed by name.
    """

    masters: Tensor
    working: Tensor
    parameters: dict[str, Tensor]

    @property
    def gradients(self) -> Tensor:
        """Gradients of all weights, float32 [N]."""

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return views of a flat tensor with the layout of ``masters``, keyed by weight name."""

    def slice_of(self, names: list[str]) -> slice:
        """Return the slice of the flat tensors that contains these neighbouring weights."""

    def publish(self) -> None:
        """Copy ``masters`` to ``working`` after an update."""

    def drop_gradients(self) -> None:
        """Drop the gradients of all weights."""


@dataclass(frozen=True)
class ParameterGroup:
    """Neighbouring weights with one peak learning rate.

    Attributes:
        place: slice of the weights in the flat tensors.
        learning_rate: peak learning rate.
    """

    place: slice
    learning_rate: float


class Scalars:
    """Scalars of the optimizer's state in one flat float32 tensor, so that the state guard reads them as one part.

    Attributes:
        flat_S: float32 [CAPACITY]; unused elements are zero.
        views: 0-d views of ``flat_S``, keyed by the scalar's name.
    """

    CAPACITY = 512

    def __init__(self, device: torch.device) -> None:
        self.flat_S = torch.zeros(self.CAPACITY, device=device)
        self.views: dict[str, Tensor] = {}

    def add(self, name: str, value: float = 0.0) -> Tensor:
        """Add a scalar with an initial value. Return its 0-d view.

        Raises:
            ValueError: the name exists already, or the capacity is exhausted.
        """
        if name in self.views or len(self.views) == self.CAPACITY:
            raise ValueError(
                f"cannot add the scalar {name!r}: it exists already, or the maximum of {self.CAPACITY} is reached"
            )
        self.views[name] = self.flat_S[len(self.views)].fill_(value)
        return self.views[name]


class UpdateRule(ABC, Generic[S]):
    """Computes weights from gradients. All state is on the device, so that ``step`` does not synchronise.

    Args:
        weights: the trained weights.
        groups: parameter groups, which together contain all weights.
        section: the recipe's section for this rule.
        scalars: collection to which the rule adds its scalars.

    Attributes:
        buffers: state per weight, keyed by name: flat tensors of at least N elements in the layout of the weights.
        tables: other state, keyed by name: flat tensors in the rule's own layout. Their length is a multiple of
            ``TABLE_MULTIPLE``.
    """

    buffers: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]

    def __init__(self, weights: TrainedWeights, groups: Sequence[ParameterGroup], section: S, scalars: Scalars) -> None:
        self._weights, self._groups, self._section = weights, groups, section
        self.buffers, self.tables = {}, {}
        self._allocate(scalars)

    @abstractmethod
    def _allocate(self, scalars: Scalars) -> None:
        """Allocate all state that ``step`` needs: ``buffers``, ``tables``, and entries of ``scalars``."""

    @abstractmethod
    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        """Update the masters from ``weights.gradients``.

        The gradients may be overwritten; the caller drops them afterwards. The caller has disabled autograd.

        Args:
            factor: the schedule's factor of the peak learning rates.
            held: whether to skip the update: float32 0-d, 0 or 1. If it is 1, no bit of weights, buffers, tables and
                scalars may change, even if gradients are not finite.
            divisor: number by which the gradients must be divided (loss scale and clipping), float32 0-d.
        """

    @property
    def logged(self) -> Mapping[str, Tensor]:
        """Values of the last ``step`` for the log: 0-d tensors on the device, keyed by name. The names never change."""
        return {}

    @classmethod
    def averaged(cls, section: S, name: str, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the weight that users get: its float32 average if ``section.averages``, otherwise the weight.

        ``state`` is keyed by ``state_name``. Overrides must use only elementwise operations, so that every device and
        every layout gives the same bits.
        """
        return weight

    def _over_groups(self, values: Sequence[Tensor]) -> Tensor:
        """Return the sum of one value per group, each multiplied by the group's relative learning rate.

        The relative rate is the group's learning rate divided by the recipe's learning rate.
        """
        multiples = [group.learning_rate / self._section.learning_rate for group in self._groups]
        return torch.stack([value * multiple for value, multiple in zip(values, multiples, strict=True)]).sum()

    def _descend(self, update_N: Tensor, rate: Tensor | float, hold: Tensor) -> None:
        """Subtract ``rate`` times the group's learning rate times (update + weight decay * weight) from the masters.

        Args:
            update_N: update without weight decay, float32 [N]; overwritten.
            rate: the schedule's factor, times a factor of the rule itself.
            hold: bool 0-d; if true, the masters do not change.
        """
        masters_N = self._weights.masters
        update_N.add_(masters_N, alpha=self._section.weight_decay)
        for group in self._groups:
            update_N[group.place].mul_(rate * -group.learning_rate)
        write(masters_N, update_N.add_(masters_N), hold)


def state_name(weight: str, buffer: str) -> str:
    """Return the name that a weight's part of a buffer has in checkpoints."""
    return f"{weight}.{buffer}"


def shown_weights(
    rule: type[UpdateRule[S]],
    section: S,
    trained: Mapping[str, Tensor],
    ema: Mapping[str, Tensor],
    state: Callable[[], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """Return the weights that users get, keyed by name.

    They are the averages in the dtype of the weights, or ``trained`` itself if no average is kept.

    Only this function decides which weights users get. It is used for previews, held-out losses and files of a run, and
    for everything that is computed from a checkpoint.

    Args:
        rule: the update rule.
        section: the rule's section in the recipe.
        trained: weights that an update changes, keyed by name.
        ema: averages of ``train.ema_decay``, keyed by name; empty without an EMA.
        state: function that returns the rule's state, keyed by ``state_name``. Called only if the rule averages.

    Raises:
        ResumeError: "resume-optimizer-changed", the rule averages, but the state is from another rule.
    """
    if section.averages:
        held = state()
        try:
            shown = {name: rule.averaged(section, name, weight, held) for name, weight in trained.items()}
        except KeyError as error:
            raise other_state(section, str(error)) from error
    elif ema:
        shown = dict(ema)
    else:
        return trained
    return {name: tensor.to(trained[name].dtype) if name in trained else tensor for name, tensor in shown.items()}


def other_state(section: OptimSection, where: str) -> ResumeError:
    """Return the error for a checkpoint that has the optimizer state of another update rule.

    ``where``: location of the difference, for the message.
    """
    return ResumeError(
        "resume-optimizer-changed",
        f"The checkpoint's optimizer state does not fit optim.optimizer: {section.optimizer}.",
        where=where,
        fix="Set optim.optimizer to the value with which the run started. If it has this value already, an earlier "
        "version of lora-rocm stored different state: continue with that version, or start a new run.",
    )


TABLE_MULTIPLE = 64
"""Table lengths are multiples of this number of elements, because the state guard reads rows of 16 bytes."""


def write(state: Tensor, new: Tensor, hold: Tensor) -> None:
    """Write ``new`` into ``state``. If ``hold`` is true, no bit of ``state`` changes. ``new`` is overwritten.

    Multiplying by 0 instead of selecting would let non-finite values of ``new`` through.
    """
    state.copy_(torch.where(hold, state, new, out=new))


def one_minus_power(base: float, exponent: Tensor) -> Tensor:
    """Return ``1 - base**exponent``, exact to float32 even if the base is near 1."""
    return -torch.expm1(exponent * math.log(base)) if base else torch.ones_like(exponent)
