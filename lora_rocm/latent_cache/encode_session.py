"""What filling the caches needs of the run around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lora_rocm.dataset.progress import Report, ignore
from lora_rocm.latent_cache.cache import MISSING, LatentCache
from lora_rocm.latent_cache.quarantine import HeldBack, Look, OpenDoor, plain_door
from lora_rocm.rundir.event_types import RepairedEvent
from lora_rocm.rundir.run_context import NOBODY, RunContext

if TYPE_CHECKING:
    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.families.base import Tensors
    from lora_rocm.latent_cache.prefetch import Behind


@dataclass
class Encoding:
    """Where encoders run, where their entries are kept, and who hears of it.

    report: gets the progress.
    context: hears that an encoder went to the CPU or works in tiles, and of each damaged entry that was encoded again.
    tiles: image encoders work in tiles; becomes true when memory runs out.
    open_door: opens the transfer by which weights and inputs reach a device, and results come back.
    look: raises if kernels or the encoders' weights are not what they should be. Called before the first entry is made
        and before entries are written (see ``proven``); not called if nothing is encoded.
    """

    cache: LatentCache
    device: torch.device
    report: Report = ignore
    context: RunContext = NOBODY
    tiles: bool = False
    open_door: OpenDoor = plain_door
    look: Look | None = None

    def held_back(self, door: Callable[[], DeviceTransfer]) -> HeldBack:
        """Results of an encoder behind a door are kept once a look at that door has found all well."""
        look = self.look
        return HeldBack(None if look is None else lambda: look(door()))

    def put_behind(self, behind: Behind, entry: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        """Have an entry checked, fingerprinted and written by another thread, and reported if it replaces a bad one."""

        def tell() -> None:
            if fault != MISSING:
                self.context.emit(RepairedEvent(kind=entry, item=item, reason=fault))

        behind.add(partial(self.cache.put, entry, key, tensors, item), tell)
