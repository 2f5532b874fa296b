"""What is done where memory runs out in a step: less at once, with the same samples and the same noise."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_rocm.errors import MachineError
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.host.changes import BY_ID


@dataclass
class Relief:
    """The ways to need less memory, in order: smaller parts of a micro-batch, then recomputed activations.

    Attributes:
        batch_size: of a whole micro-batch.
        parts: into how many it is cut now.
        recomputes: whether activations are recomputed in the backward pass already.
    """

    family: ModelFamily
    model: LoadedModel
    batch_size: int
    parts: int
    recomputes: bool
    emit: Callable[..., Any]

    def take(self, full: MachineError) -> None:
        """Change something, so that the step can be tried again.

        Raises:
            MachineError: ``full``, where nothing is left to change.
        """
        empty_pools()
        if self.parts < self.batch_size:
            self.parts *= 2
            self._tell("micro-batch-halved")
        elif not self.recomputes:
            self.family.recompute_activations(self.model)
            self.recomputes = True
            self._tell("checkpointing")
        else:
            raise full

    def _tell(self, change: str) -> None:
        row = BY_ID[change]
        self.emit("change", id=row.id, effect=row.effect, seen="out-of-memory", text=row.text)


def empty_pools() -> None:
    """Give memory that torch keeps for later back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
