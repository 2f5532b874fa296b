"""The held-out loss: each sample at fixed positions of the noise schedule with fixed noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_rocm.device.transfer import DeviceTransfer, fingerprint
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors
from lora_rocm.loader.batch import Batch, split
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.loop import seed_for

VALIDATION_POSITIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Positions in the noise schedule at which the held-out loss is taken; fixed, so that values are comparable."""


@dataclass(frozen=True)
class HeldOutLoss:
    """Computes losses without gradients.

    Attributes:
        losses: (batch, draws), both on the device -> unweighted loss of each sample, float32 [B].
        parts: the number of parts that each batch is split into, for a batch trained in parts does not fit here either.
    """

    family: ModelFamily
    model: LoadedModel
    transfer: DeviceTransfer
    losses: Callable[[Tensors, Tensors], Tensor]
    context: RunContext
    parts: int = 1

    @torch.no_grad()
    def of(self, batches: Iterable[Batch]) -> list[tuple[str, float, int]]:
        """(sample key, loss, ``Item.share``) of each sample at each position, in the order of the batches."""
        found = list[tuple[str, float, int]]()
        for component in self.model.components.values():
            component.eval()
        self.context.beat("loader")
        for batch in batches:
            for part in split(batch, self.parts):
                real = (part.tensors["weight"] > 0).tolist()
                for place in VALIDATION_POSITIONS:
                    self.context.beat("validation")
                    losses = self._losses(part, place).tolist()
                    rows = zip(part.sample_keys, losses, part.shares, real, strict=True)
                    found += [(key, loss, share) for key, loss, share, counts in rows if counts]
            self.context.beat("loader")
        for component in self.model.components.values():
            component.train()
        return found

    def _losses(self, batch: Batch, place: float) -> Tensor:
        """Per-sample loss on the CPU. Noise depends on the sample alone. The transfer is checked as in training."""
        seeds = [seed_for("validation", key, place) for key in batch.sample_keys]
        draws = self.family.objective.fixed_draw(batch.tensors, seeds, place).tensors
        fingerprints = {**batch.fingerprints, **{name: fingerprint(draw_B) for name, draw_B in draws.items()}}
        while True:
            tensors, _ = self.transfer.send({**batch.tensors, **draws}, fingerprints)
            if not bool(self.transfer.bad):
                break
            self.transfer.failed(f"validation, samples {', '.join(batch.sample_keys)}")
        self.transfer.succeeded()
        sent_draws = {name: tensors.pop(name) for name in draws}
        return self.losses(tensors, sent_draws).float().cpu()
