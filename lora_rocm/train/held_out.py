"""The held-out loss: each sample is measured with fixed noise at fixed positions of the noise schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lora_rocm.device.transfer import DeviceTransfer, fingerprint
from lora_rocm.families.base import ComputesLosses, LoadedModel, Tensors
from lora_rocm.loader.batch import Batch, split
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.loop import seed_for

VALIDATION_POSITIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Positions in the noise schedule at which the held-out loss is measured; fixed, so that values are comparable."""


class HeldOut(NamedTuple):
    """The loss and measures of a sample at one position. share: the sample's weight in the mean, see ``Item.share``."""

    key: str
    loss: float
    share: int
    measures: Mapping[str, float]


@dataclass(frozen=True)
class HeldOutLoss:
    """Computes held-out losses, without gradients.

    Attributes:
        measured: computes, from a batch and its draws on the device, each sample's unweighted loss, float32 [B], and
            its measures.
        parts: number of parts that each batch is split into. A batch that is split in training does not fit whole here
            either.
    """

    family: ComputesLosses
    model: LoadedModel
    transfer: DeviceTransfer
    measured: Callable[[Tensors, Tensors], tuple[Tensor, Mapping[str, Tensor]]]
    context: RunContext
    parts: int = 1

    @torch.no_grad()
    def of(self, batches: Iterable[Batch]) -> list[HeldOut]:
        """Results of each sample at each position, in the order of the batches.

        If the objective draws no noise, each sample is measured once.
        """
        found = list[HeldOut]()
        for component in self.model.components.values():
            component.eval()
        self.context.beat("loader")
        for batch in batches:
            for part in split(batch, self.parts):
                real = (part.tensors["weight"] > 0).tolist()
                for place in VALIDATION_POSITIONS:
                    self.context.beat("validation")
                    draws = self._draws(part, place)
                    loss_B, measures = self._measured(part, draws)
                    for row, (key, share) in enumerate(zip(part.sample_keys, part.shares, strict=True)):
                        if real[row]:
                            of_row = {name: value_B[row] for name, value_B in measures.items()}
                            found.append(HeldOut(key, loss_B[row], share, of_row))
                    if not draws:
                        break
            self.context.beat("loader")
        for component in self.model.components.values():
            component.train()
        return found

    def _draws(self, batch: Batch, place: float) -> Tensors:
        """The draws for a batch at a position. A sample's noise depends only on the sample and the position."""
        seeds = [seed_for("validation", key, place) for key in batch.sample_keys]
        return self.family.objective.fixed_draw(batch.tensors, seeds, place).tensors

    def _measured(self, batch: Batch, draws: Tensors) -> tuple[list[float], dict[str, list[float]]]:
        """Loss and measures of each sample. As in training, the transfer is checked, and repeated if it failed."""
        fingerprints = {**batch.fingerprints, **{name: fingerprint(draw_B) for name, draw_B in draws.items()}}
        while True:
            tensors, _ = self.transfer.send({**batch.tensors, **draws}, fingerprints)
            if not bool(self.transfer.bad):
                break
            self.transfer.failed(f"validation, samples {', '.join(batch.sample_keys)}")
        self.transfer.succeeded()
        sent_draws = {name: tensors.pop(name) for name in draws}
        loss_B, measures = self.measured(tensors, sent_draws)
        # Waits for the device, once per batch: validation is rare
        return loss_B.float().tolist(), {name: value_B.tolist() for name, value_B in measures.items()}
