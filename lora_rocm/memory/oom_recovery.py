"""Out-of-memory recovery within a step: reduce the memory and retry with the same samples and noise."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_rocm.device.allocator import Usage, empty_pools
from lora_rocm.device.attention import Context
from lora_rocm.errors import MachineError
from lora_rocm.families.base import LoadedModel, PlansMemory
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.rules.mitigations import change_event
from lora_rocm.rundir.run_context import RunContext

EMPTY_EVERY_UPDATES = 100
"""Emptying the pools again within fewer updates does not help."""


@dataclass
class Relief:
    """Steps that reduce memory, in order: defragment the pools, split micro-batches, recompute activations.

    Attributes:
        batch_size: of a whole micro-batch.
        parts: the current number of parts.
        recomputes: whether activations are already recomputed.
        again: contexts in which activations are recomputed.
    """

    family: PlansMemory
    model: LoadedModel
    batch_size: int
    parts: int
    recomputes: bool
    context: RunContext
    again: Context | None = None
    _emptied_at: int | None = field(default=None, init=False)  # updates

    def take(self, full: MachineError, seen: Usage | None, updates: int) -> str:
        """Reduce the memory so that the step can be retried; return the change as text.

        Args:
            full: the out-of-memory error.
            seen: memory usage at that moment; None if unknown.
            updates: number of updates made so far.

        Raises:
            MachineError: ``full``, if nothing is left to reduce.
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
            self.family.recompute_activations(self.model, how)
            self.recomputes = True
            self.context.emit(change_event("checkpointing", "out-of-memory"))
            return "repeated, and activations are recomputed instead of kept"
        raise full

    def _may_empty_again(self, updates: int) -> bool:
        return self._emptied_at is None or updates - self._emptied_at >= EMPTY_EVERY_UPDATES
