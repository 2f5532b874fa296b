"""The held-out loss: each sample at fixed positions of the noise schedule with fixed noise."""

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
"""Positions in the noise schedule for the held-out loss; fixed, so that values are comparable."""


class HeldOut(NamedTuple):
    """Result for a sample. share: ``Item.share``."""

    key: str
    loss: float
    share: int
    measures: Mapping[str, float]


@dataclass(frozen=True)
class HeldOutLoss:
    """Computes losses without gradients.

    Attributes:
        measured: (batch, draws), both on the device -> unweighted loss of each sample, float32 [B], and measures.
        parts: each batch is split into this many parts, because a batch trained in parts does not fit here either.
    """

    family: ComputesLosses
    model: LoadedModel
    transfer: DeviceTransfer
    measured: Callable[[Tensors, Tensors], tuple[Tensor, Mapping[str, Tensor]]]
    context: RunContext
    parts: int = 1

    @torch.no_grad()
    def of(self, batches: Iterable[Batch]) -> list[HeldOut]:
        """Results for each sample at each position, in the order of the batches.

        There is one position if the objective draws no noise.
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
        """The draws at a position. Noise depends on the sample alone."""
        seeds = [seed_for("validation", key, place) for key in batch.sample_keys]
        return self.family.objective.fixed_draw(batch.tensors, seeds, place).tensors

    def _measured(self, batch: Batch, draws: Tensors) -> tuple[list[float], dict[str, list[float]]]:
        """Loss and measures of each sample. The transfer is checked as in training."""
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
