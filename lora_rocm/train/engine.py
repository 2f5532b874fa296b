"""One micro-batch on the device: forward, backward, gradients into the flat buffer. Waits for nothing.

On a fast GPU a step is some ten thousand launches, and the host is slower than the device. So where it is allowed, a
pass whose shapes come again is captured as a graph (``train/graphs.py``) and replayed by one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.families.objectives.loss import losses
from lora_rocm.train.graphs import Graphs, Passed


@dataclass
class Engine:
    """Computes losses and gradients.

    Attributes:
        loss_scale: float32 0-d on the device, multiplied into the gradients; always the same tensor.
        graphs: None where passes are not to be captured.
    """

    family: ModelFamily
    model: LoadedModel
    weights: FlatWeights
    loss_scale: Tensor
    autocast: Callable[[], AbstractContextManager[Any]]
    graphs: Graphs | None = None

    def run(self, batch: Tensors, draws: Tensors) -> Passed:
        """The losses of a micro-batch; its gradients are added to those in the flat buffer."""
        return self._eager(batch, draws) if self.graphs is None else self.graphs.run(self._eager, batch, draws)

    def losses(self, batch: Tensors, draws: Tensors) -> Tensor:
        """Unweighted loss of each sample, float32 [B]."""
        with self.autocast():
            return losses(self.family, self.model, batch, draws)

    def release(self) -> None:
        """Give back what captured passes hold: they are captured again when their shapes come."""
        if self.graphs is not None:
            self.graphs.release()

    def _eager(self, batch: Tensors, draws: Tensors) -> Passed:
        loss_B = self.losses(batch, draws)
        loss = (loss_B * batch["weight"]).sum()
        (loss * self.loss_scale).backward()
        self.weights.gather()
        return Passed(loss.detach(), loss_B.detach())
