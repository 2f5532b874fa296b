"""What of a step is kept in memory: chosen before loading, put into the model, corrected by a first pass."""

from __future__ import annotations

from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel, ModelFamily
from lora_rocm.families.recompute import recomputing
from lora_rocm.run.memory_plan import Plan
from lora_rocm.train.offload import Offload


def apply(
    plan: Plan, family: ModelFamily, model: LoadedModel, transfer: DeviceTransfer, *, pin: bool, anew: bool = False
) -> Offload | None:
    """Put a plan into a model; the offloaded weights are taken over where they are, on the CPU or on the device.

    ``anew``: another plan was in force; its ``Offload`` is closed.
    """
    blocks = family.blocks(model)
    if plan.recomputed or anew:
        chosen = None if len(plan.recomputed) == len(blocks) else [blocks[index] for index in plan.recomputed]
        family.recompute_activations(model, recomputing(model, chosen))
    if not plan.offloaded:
        return None
    return Offload([blocks[index] for index in plan.offloaded], transfer, pin)
