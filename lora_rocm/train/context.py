"""What one start of the worker has in hand, and what follows from it alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lora_rocm.device.process_group import World
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.hardware.settings import Settings
from lora_rocm.loader.batches import BatchPlan, Prepared
from lora_rocm.loader.worker_pool import Workers
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.checkpoint import Checkpoint
from lora_rocm.train.lost_images import DataOfCheckpoint
from lora_rocm.train.session import Session


@dataclass(frozen=True)
class StartContext:
    """What one start of the worker has in hand before anything is loaded.

    Attributes:
        dtype: of the base and of the autocast.
        settings: what the parent planned for this machine.
        checkpoint: what to go on from.
        accept_changes: also where recipe, data or base are not those of the checkpoint.
        attempt: no lower one is drawn noise for (``Position.attempt``).
        world: the processes that train together.
    """

    session: Session
    recipe: Recipe
    device: torch.device
    dtype: torch.dtype
    settings: Settings = Settings()
    checkpoint: Checkpoint | None = None
    accept_changes: bool = False
    attempt: int = 0
    world: World = field(default_factory=World)

    @property
    def context(self) -> RunContext:
        """Of the run."""
        return self.session.context


@dataclass
class Data:
    """What the data phase leaves: items in the caches and the plan over them.

    kept: of a run whose training is complete and whose images have vanished; there are no items then.
    """

    prepared: Prepared
    plan: BatchPlan
    max_train_steps: int
    workers: Workers
    kept: DataOfCheckpoint | None = None

    def identity(self) -> str:
        """Changes when a resumed run would see other samples in another order."""
        return self.prepared.identity() if self.kept is None else self.kept.identity

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch if self.kept is None else self.kept.steps_per_epoch


def transfer_of(start: StartContext) -> DeviceTransfer:
    """A new door to the device, as planned for this machine."""
    settings = start.settings
    return DeviceTransfer(start.device, pin=pins(start), first=settings.copy_method, heap_copy=settings.heap_copy)


def pins(start: StartContext) -> bool:
    """Whether copies to the device go through pinned memory."""
    return start.device.type == "cuda" and start.settings.pins(start.recipe.runtime.pin_memory)


def captures(start: StartContext) -> bool:
    """Whether passes are to be captured as graphs; dropout draws in them, from a generator that is set for each."""
    allowed = start.recipe.runtime.graphs == "auto" and start.settings.graphs
    return start.device.type == "cuda" and allowed and not start.recipe.lora.dropout
