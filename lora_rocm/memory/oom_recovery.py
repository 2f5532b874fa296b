"""Recovery when memory runs out in a step: reduces memory, so that the step can be repeated with the same samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lora_rocm.device.allocator import Usage, empty_pools
from lora_rocm.device.attention import Context
from lora_rocm.errors import MachineError
from lora_rocm.families.base import LoadedModel, PlansMemory
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.run_context import RunContext

EMPTY_EVERY_UPDATES = 100
"""Minimum number of updates between two releases of the pools, because releasing them more often does not help."""


@dataclass
class Relief:
    """Reduces memory, one measure after the other: defragment the pools, split micro-batches, recompute activations.

    Attributes:
        batch_size: number of samples in a micro-batch that is not split.
        parts: number of parts into which a micro-batch is now split.
        recomputes: whether activations are already recomputed.
        again: returns contexts in which activations are recomputed, or None.
        least: returns the recomputation that keeps least, or None if nothing of the model is in main memory.
    """

    family: PlansMemory
    model: LoadedModel
    batch_size: int
    parts: int
    recomputes: bool
    context: RunContext
    again: Context | None = None
    least: Callable[[], Recomputing] | None = None
    _emptied_at: int | None = field(default=None, init=False)  # updates

    def take(self, full: MachineError, seen: Usage | None, updates: int) -> str:
        """Reduce the memory needed, so that the step can be repeated; return a description of the change.

        Args:
            full: the out-of-memory error.
            seen: memory usage at that moment, or None if unknown.
            updates: number of updates made so far.

        Raises:
            MachineError: ``full`` itself, if nothing is left to reduce.
        """
        empty_pools()
        if seen is not None and seen.fragmented and self._may_empty_again(updates):
            self._emptied_at = updates
            return f"{seen}: fragmented, so all free memory was released, and the step is repeated unchanged"
        if self.parts < self.batch_size:
            self.parts *= 2
            self.context.emit(change_event("micro-batch-halved", "out-of-memory"))
            return f"repeated in up to {min(self.parts, self.batch_size)} parts"
        if not self.recomputes:
            how = None if self.again is None else Recomputing(self.model, together=True, again=self.again)
            how = how if self.least is None else self.least()
            self.family.recompute_activations(self.model, how)
            self.recomputes = True
            self.context.emit(change_event("checkpointing", "out-of-memory"))
            return "repeated, and activations are recomputed instead of kept"
        raise full

    def _may_empty_again(self, updates: int) -> bool:
        return self._emptied_at is None or updates - self._emptied_at >= EMPTY_EVERY_UPDATES
