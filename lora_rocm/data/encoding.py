"""What filling the caches needs of the run around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from lora_rocm.data.cache import MISSING, LatentCache
from lora_rocm.data.progress import Report, ignore
from lora_rocm.data.proven import HeldBack, Look, OpenDoor, plain_door

if TYPE_CHECKING:
    from lora_rocm.data.ahead import Behind
    from lora_rocm.device.transfer import DeviceTransfer
    from lora_rocm.families.base import Tensors

Repaired = Callable[[str, str, str], None]
"""Called with entry name, item (image or caption) and what was wrong, when a damaged entry was encoded again."""


@dataclass
class Encoding:
    """Where encoders run, where their entries are kept, and who hears of it.

    report: gets the progress.
    notice: gets sentences about the encoders: kernels are being built, an encoder went to the CPU.
    repaired: gets every damaged entry that was encoded again.
    tiles: image encoders work in tiles; becomes true when memory runs out, and ``tiles_needed`` is called.
    open_door: opens the transfer by which weights and inputs reach a device, and results come back.
    look: raises if kernels or the encoders' weights are not what they should be. Called before the first entry is made
        and before entries are written (see ``proven``); not called if nothing is encoded.
    """

    cache: LatentCache
    device: torch.device
    report: Report = ignore
    notice: Callable[[str], None] = lambda text: None
    repaired: Repaired = lambda *facts: None
    tiles: bool = False
    tiles_needed: Callable[[], None] = lambda: None
    open_door: OpenDoor = plain_door
    look: Look | None = None

    def held_back(self, door: Callable[[], DeviceTransfer]) -> HeldBack:
        """Results of an encoder behind a door are kept once a look at that door has found all well."""
        look = self.look
        return HeldBack(None if look is None else lambda: look(door()))

    def put_behind(self, behind: Behind, entry: str, key: str, tensors: Tensors, item: str, fault: str) -> None:
        """Have an entry checked, fingerprinted and written by another thread, and reported if it replaces a bad one."""
        tell = partial(self.repaired, entry, item, fault) if fault != MISSING else lambda: None
        behind.add(partial(self.cache.put, entry, key, tensors, item), tell)
