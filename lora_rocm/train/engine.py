"""Computes the forward and backward pass of one micro-batch, without waiting for the device.

The gradients are added to one flat buffer for all trained weights. On a fast GPU a step takes some ten thousand kernel
launches, and the host is slower than the device. So, if allowed, passes of frequent shapes are captured as graphs
(``train/graphs.py``) and replayed with one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.device.attention import Context
from lora_rocm.families.base import ComputesLosses, LoadedModel, Tensors
from lora_rocm.families.objectives.loss import measured
from lora_rocm.train.graphs import Graphs, Passed


@dataclass
class Engine:
    """Computes losses and gradients.

    Attributes:
        loss_scale: a factor of the gradients, float32 0-d on the device; always the same tensor.
        graphs: the captured passes, or None if passes are not captured.
        attention: returns a context that selects the planned attention implementation.
    """

    family: ComputesLosses
    model: LoadedModel
    weights: FlatWeights
    loss_scale: Tensor
    autocast: Callable[[], AbstractContextManager[Any]]
    graphs: Graphs | None = None
    attention: Context = nullcontext

    def run(self, batch: Tensors, draws: Tensors) -> Passed:
        """Compute the losses of a micro-batch, and add its gradients to the flat buffer."""
        return self._eager(batch, draws) if self.graphs is None else self.graphs.run(self._eager, batch, draws)

    def measured(self, batch: Tensors, draws: Tensors) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the unweighted loss of each sample, float32 [B], and the ``Prediction.measures``."""
        with self.attention(), self.autocast():
            return measured(self.family, self.model, batch, draws)

    def release(self) -> None:
        """Free the captured graphs. They are captured again when their shapes recur."""
        if self.graphs is not None:
            self.graphs.release()

    def _eager(self, batch: Tensors, draws: Tensors) -> Passed:
        loss_B, measures = self.measured(batch, draws)
        loss = (loss_B * batch["weight"]).sum()
        (loss * self.loss_scale).backward()
        self.weights.gather()
        sums = {name: (value_B * batch["weight"]).sum() for name, value_B in measures.items()}
        return Passed(loss.detach(), loss_B.detach(), sums)
