"""The inputs of one start of the worker, and values derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.device.placement.base import Placement, Resident
from lora_rocm.device.placement.streamed import Streamed, free_for_encoder
from lora_rocm.device.process_group import World
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.hardware.settings import Settings
from lora_rocm.loader.batches import BatchPlan, Prepared
from lora_rocm.loader.worker_pool import LoaderWorkers
from lora_rocm.memory.footprint_process import FootprintProcess
from lora_rocm.processes.start_jobs import CountRequest
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.checkpoint import Checkpoint
from lora_rocm.train.lost_images import DataOfCheckpoint
from lora_rocm.train.session import Session
from lora_rocm.train.watched import Watched


@dataclass(frozen=True)
class StartContext:
    """The inputs of one start of the worker, before anything is loaded.

    Attributes:
        dtype: the dtype of the base model and of autocast.
        settings: the parent's plan for this machine.
        checkpoint: the checkpoint to resume from, or None to start at the beginning.
        accept_changes: whether to resume even if recipe, data or base model differ from the checkpoint's.
        attempt: minimum for ``Position.attempt``, a number that selects the noise.
        world: the process group of the ranks that train together.
        counting: a process that counts the step's memory, or None if loading counts it.
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
    counting: FootprintProcess | None = None

    @property
    def context(self) -> RunContext:
        return self.session.context

    @property
    def count_request(self) -> CountRequest:
        """The dtype and settings for which ``counting`` counts. The test of attention may change the settings."""
        return CountRequest(str(self.dtype).removeprefix("torch."), self.settings.to_text())


@dataclass
class Data:
    """The result of the data phase: items in the caches, and the batch plan over them.

    Attributes:
        kept: data facts from the checkpoint, if training is complete and the images are missing or changed. In this
            case there are no items.
        watched: the samples of ``data.watched``, or None if there are none.
    """

    prepared: Prepared
    plan: BatchPlan
    max_train_steps: int
    workers: LoaderWorkers
    kept: DataOfCheckpoint | None = None
    watched: Watched | None = None

    def identity(self) -> str:
        """Digest of the samples and their order; if it differs, a resumed run would train on different batches."""
        return self.prepared.identity() if self.kept is None else self.kept.identity

    def facts(self) -> dict[str, str | bool]:
        """Facts about the data that a checkpoint stores for the next start."""
        plan = self.plan
        return {"data": self.identity(), "by_length": plan.by_length, "one_bucket_updates": plan.one_bucket_updates}

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch if self.kept is None else self.kept.steps_per_epoch


def transfer_of(start: StartContext) -> DeviceTransfer:
    """Return a new transfer to the device, with the settings planned for this machine."""
    settings = start.settings
    return DeviceTransfer(start.device, pin=pins(start), first=settings.copy_method, heap_copy=settings.heap_copy)


def encoder_placement(start: StartContext, device: torch.device) -> Placement:
    """Return a new placement for an encoder on a device. On a discrete GPU it can stream layers from main memory."""
    on = replace(start, device=device)
    if device.type != "cuda" or shares_main_memory(device):
        return Resident(transfer_of(on))
    return Streamed(
        partial(transfer_of, on), partial(free_for_encoder, device, start.settings), pins(on), start.context
    )


def pins(start: StartContext) -> bool:
    """Whether copies to the device go through pinned memory."""
    return start.device.type == "cuda" and start.settings.pins(start.recipe.runtime.pin_memory)


def captures(start: StartContext) -> bool:
    """Whether passes are captured as graphs. Never with ``lora.dropout``: each pass then draws random numbers."""
    allowed = start.recipe.runtime.graphs == "auto" and start.settings.graphs
    return start.device.type == "cuda" and allowed and not start.recipe.lora.dropout
