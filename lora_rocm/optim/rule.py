"""What an optimizer is made of: its update rule, the state of the rule, and the weights that it moves.

An update rule is one file. It says how weights follow from gradients and what it remembers; gating, clipping, the loss
scale, the average of the weights, the state guard and checkpoints are the same for all rules (``base``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lora_rocm.recipe.schema import OptimSection


class TrainedWeights(Protocol):
    """All trained weights as flat tensors.

    Attributes:
        masters: [N] the weights; what an update moves.
        working: [N] what the layers compute with; the masters themselves if both have one format.
        parameters: name -> view of ``masters``.
    """

    masters: Tensor
    working: Tensor
    parameters: dict[str, Tensor]

    @property
    def gradients(self) -> Tensor:
        """Float32 [N]."""

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Name -> its part of a tensor of the layout of ``masters``."""

    def slice_of(self, names: list[str]) -> slice:
        """The place of neighbours."""

    def publish(self) -> None:
        """After ``masters`` have changed: bring ``working`` up to date."""

    def drop_gradients(self) -> None:
        """Forget all gradients."""


@dataclass(frozen=True)
class Group:
    """Weights that are neighbours and have one peak learning rate.

    Attributes:
        place: in the flat tensors.
        learning_rate: the peak.
    """

    place: slice
    learning_rate: float


class Scalars:
    """Float32 numbers of the optimizer's state, in one flat tensor, so that the state guard reads them as one part.

    Attributes:
        flat_S: float32 [CAPACITY]; numbers that nobody has added are zero.
        views: name -> float32 0-d view.
    """

    CAPACITY = 64

    def __init__(self, device: torch.device) -> None:
        self.flat_S = torch.zeros(self.CAPACITY, device=device)
        self.views: dict[str, Tensor] = {}

    def add(self, name: str, value: float = 0.0) -> Tensor:
        """A new number as a 0-d view.

        Raises:
            ValueError: the name is taken, or there is no room for another number.
        """
        if name in self.views or len(self.views) == self.CAPACITY:
            raise ValueError(f"no room for a number {name!r} beside {len(self.views)} others")
        self.views[name] = self.flat_S[len(self.views)].fill_(value)
        return self.views[name]


class UpdateRule(ABC):
    """How weights follow from gradients. ``step`` waits for nothing: all state is on the device.

    Args:
        weights: the trained weights.
        groups: cover all of them.
        section: the recipe's section of this rule.
        scalars: where the rule adds its numbers. These are state as ``buffers`` are.

    Attributes:
        buffers: name -> state for each weight, [N], in the layout of the weights. All memory that ``step`` keeps is
            made by the constructor.
    """

    buffers: Mapping[str, Tensor]

    @abstractmethod
    def __init__(
        self, weights: TrainedWeights, groups: Sequence[Group], section: OptimSection, scalars: Scalars
    ) -> None: ...

    @abstractmethod
    def step(self, factor: float, held: Tensor, divisor: Tensor) -> None:
        """Move the masters by ``weights.gradients``, which are dropped afterwards and may be overwritten.

        Args:
            factor: of the schedule, by which the peak learning rates are multiplied.
            held: float32 0-d, 0 or 1. If it is 1, then no bit of weights, buffers and numbers may change, whatever the
                gradients are.
            divisor: float32 0-d, by which the gradients have to be divided: loss scale and clipping.
        """

    @property
    def logged(self) -> Mapping[str, Tensor]:
        """Name -> 0-d tensor on the device: what the last ``step`` tells the user. The names never change."""
        return {}

    @staticmethod
    @abstractmethod
    def itemsizes(weight_dtype: torch.dtype) -> tuple[int, ...]:
        """Bytes that each of ``buffers`` takes for one trained weight of this format."""

    @staticmethod
    @abstractmethod
    def description(section: OptimSection) -> str:
        """Class and arguments, as kohya's metadata write them in ``ss_optimizer``."""
