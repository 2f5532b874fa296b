"""The interfaces of an optimizer: update rule, its state, and the weights that it updates.

An update rule is one file. It computes weights from gradients and keeps its own state. Gating, clipping, loss scale,
EMA, state guard and checkpoints are shared by all rules (``base``).
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
        masters: [N] the weights that an update changes.
        working: [N] the compute copy in the layers; the masters themselves if both have one dtype.
        parameters: name -> view of ``masters``.
    """

    masters: Tensor
    working: Tensor
    parameters: dict[str, Tensor]

    @property
    def gradients(self) -> Tensor:
        """Gradients, float32 [N]."""

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Name -> its view of a tensor with the layout of ``masters``."""

    def slice_of(self, names: list[str]) -> slice:
        """The slice of neighbouring parameters in the flat tensors."""

    def publish(self) -> None:
        """Copy ``masters`` to ``working`` after an update."""

    def drop_gradients(self) -> None:
        """Drop all gradients."""


@dataclass(frozen=True)
class ParameterGroup:
    """Neighbouring weights with one peak learning rate.

    Attributes:
        place: slice of the flat tensors.
        learning_rate: the peak.
    """

    place: slice
    learning_rate: float


class Scalars:
    """Float32 scalars of the optimizer's state in one flat tensor, so that the state guard reads them as one part.

    Attributes:
        flat_S: float32 [CAPACITY]; unused entries are zero.
        views: name -> float32 0-d view.
    """

    CAPACITY = 512

    def __init__(self, device: torch.device) -> None:
        self.flat_S = torch.zeros(self.CAPACITY, device=device)
        self.views: dict[str, Tensor] = {}

    def add(self, name: str, value: float = 0.0) -> Tensor:
        """Add a scalar and return its 0-d view.

        Raises:
            ValueError: the name is taken, or the capacity is used up.
        """
        if name in self.views or len(self.views) == self.CAPACITY:
            raise ValueError(f"cannot add the scalar {name!r} to {len(self.views)} others")
        self.views[name] = self.flat_S[len(self.views)].fill_(value)
        return self.views[name]


class UpdateRule(ABC, Generic[S]):
    """Computes weights from gradients. ``step`` does not synchronise: all state is on the device.

    Args:
        weights: the trained weights.
        groups: cover all weights.
        section: the recipe's section of this rule.
        scalars: see ``_allocate``.

    Attributes:
        buffers: name -> state per weight, at least [N], in the layout of the weights.
        tables: name -> other state, flat, in its own layout; a multiple of ``TABLE_MULTIPLE`` elements.
    """

    buffers: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]

    def __init__(self, weights: TrainedWeights, groups: Sequence[ParameterGroup], section: S, scalars: Scalars) -> None:
        self._weights, self._groups, self._section = weights, groups, section
        self.buffers, self.tables = {}, {}
        self._allocate(scalars)

    @abstractmethod
    def _allocate(self, scalars: Scalars) -> None:
        """Allocate all memory that ``step`` keeps: ``buffers``, ``tables``, and scalars, which are state like them."""

    @abstractmethod
    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        """Update the masters from ``weights.gradients``, which may be overwritten and are dropped afterwards.

        The caller has disabled autograd.

        Args:
            factor: the schedule's factor of the peak learning rates.
            held: float32 0-d, 0 or 1. If it is 1, no bit of weights, buffers, tables and scalars may change, whatever
                the gradients are.
            divisor: float32 0-d; the gradients have to be divided by it (loss scale and clipping).
        """

    @property
    def logged(self) -> Mapping[str, Tensor]:
        """Name -> 0-d tensor on the device: values of the last ``step`` for the log. The names never change."""
        return {}

    @classmethod
    def averaged(cls, section: S, name: str, weight: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The weight that users get: its average in float32 if the rule's section ``averages``.

        ``state`` is by ``state_name``. Use elementwise operations only, so that every device and every layout gives the
        same bits.
        """
        return weight

    def _over_groups(self, values: Sequence[Tensor]) -> Tensor:
        """The sum of one value per group, each times the group's multiple of the learning rate."""
        multiples = [group.learning_rate / self._section.learning_rate for group in self._groups]
        return torch.stack([value * multiple for value, multiple in zip(values, multiples, strict=True)]).sum()

    def _descend(self, update_N: Tensor, rate: Tensor | float, hold: Tensor) -> None:
        """Take ``rate`` times each group's learning rate times (update + weight decay) from the masters.

        Args:
            update_N: float32, overwritten.
            rate: the schedule's factor times the rule's own factor.
            hold: bool 0-d.
        """
        masters_N = self._weights.masters
        update_N.add_(masters_N, alpha=self._section.weight_decay)
        for group in self._groups:
            update_N[group.place].mul_(rate * -group.learning_rate)
        write(masters_N, update_N.add_(masters_N), hold)


def state_name(weight: str, buffer: str) -> str:
    """The name of a weight's part of a buffer in checkpoints."""
    return f"{weight}.{buffer}"


def shown_weights(
    rule: type[UpdateRule[S]],
    section: S,
    trained: Mapping[str, Tensor],
    ema: Mapping[str, Tensor],
    state: Callable[[], Mapping[str, Tensor]],
) -> Mapping[str, Tensor]:
    """Name -> the weight that users get, in the dtype of the trained one; ``trained`` itself if no average is kept.

    The only place that decides this: for previews, held-out losses and files of a run, and for everything that is
    computed from a checkpoint.

    Args:
        rule: the update rule.
        section: its section of the recipe.
        trained: name -> weight that an update changes.
        ema: name -> average of ``train.ema_decay``; empty without.
        state: the state of the rule by ``state_name``; called only if the rule averages.

    Raises:
        ResumeError: "resume-optimizer-changed", the rule averages and the state is not its own.
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
    """The error for a checkpoint with the optimizer state of another update rule."""
    return ResumeError(
        "resume-optimizer-changed",
        f"The checkpoint does not have the optimizer state of optim.optimizer: {section.optimizer}.",
        where=where,
        fix="Set optim.optimizer to the run's first value. If it has that value, an earlier version of this program "
        "stored other state: continue with that version, or start a new run.",
    )


TABLE_MULTIPLE = 64
"""The state guard reads rows of 16 bytes."""


def write(state: Tensor, new: Tensor, hold: Tensor) -> None:
    """Write ``new`` (overwritten) into ``state`` unless ``hold`` is true; then no bit changes.

    A product with 0 instead would let non-finite values of ``new`` through.
    """
    state.copy_(torch.where(hold, state, new, out=new))


def one_minus_power(base: float, exponent: Tensor) -> Tensor:
    """``1 - base**exponent``, exact to float32 even for a base near 1."""
    return -torch.expm1(exponent * math.log(base)) if base else torch.ones_like(exponent)
