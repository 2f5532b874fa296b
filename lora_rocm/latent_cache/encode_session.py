"""``Encoding``: the run's context that filling the caches needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    from lora_rocm.device.placement.base import Placement
    from lora_rocm.families.base import Encoder, Tensors
    from lora_rocm.latent_cache.prefetch import Behind


@dataclass
class Encoding:
    """Device, cache and listeners of encoding.

    report: receives the progress.
    context: receives events if an encoder moves to the CPU or to tiles, and for each damaged entry encoded again.
    tiles: image encoders work in tiles; set after running out of memory.
    open_door: opens a placement of weights on a device; its transfer sends inputs and receives results.
    more: encoders beside those of the family, after them.
    look: raises if kernels or the encoders' weights are wrong. Called before the first encode and before each batch of
        entries is written (see ``quarantine.HeldBack``); not called if nothing is encoded.
    """

    cache: LatentCache
    device: torch.device
    report: Report = ignore
    context: RunContext = NOBODY
    tiles: bool = False
    open_door: OpenDoor = plain_door
    look: Look | None = None
    more: Sequence[Encoder] = ()

    def held_back(self, door: Callable[[], Placement]) -> HeldBack:
        """A ``HeldBack`` that keeps the results of an encoder until ``look`` passes for its placement."""
        look = self.look
        return HeldBack(None if look is None else lambda: look(door()))

    def put_behind(self, behind: Behind, entry: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        """Check, fingerprint and write an entry in another thread; emits an event if it replaces a bad one."""

        def tell() -> None:
            if fault != MISSING:
                self.context.emit(RepairedEvent(kind=entry, item=item, reason=fault))

        behind.add(partial(self.cache.put, entry, key, tensors, item), tell)
