"""Holds encoder outputs back until a check of kernels and weights passes, and only then writes them.

Otherwise a faulty kernel would poison the cache permanently: fingerprints prove that an entry is the encoder's output,
not that the output is correct.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch

from lora_rocm.device.placement.base import Placement, Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import LoraRocmError, StoppedError

OpenDoor = Callable[[torch.device], Placement]
Look = Callable[[Placement], None]
"""Raises if kernels, or the weights of this placement, are wrong."""

FIRST_HELD = 1  # entries, doubled each time, so that a run that fails early has written some
MOST_HELD = 64  # entries: some 40 MB for images of 1024x1024
MOST_HELD_S = 60.0  # the most work that a power failure may cost


def plain_door(device: torch.device) -> Placement:
    """All weights on a device, sent from unpinned memory without a planned transfer method."""
    return Resident(DeviceTransfer(device, pin=False))


class HeldBack:
    """Holds results back until a check passes, then keeps them. Without a check, results are kept at once.

    The end of a ``with`` block settles, even after a stop request or an error. If the block failed, its error
    propagates; further errors of the check or the disk (a lost device fails at every call) are suppressed, and the held
    results are lost.

    Args:
        look: the check; called before the first result is made, and before results are kept.
    """

    def __init__(self, look: Callable[[], None] | None) -> None:
        self._look, self._held, self._since = look, list[Callable[[], None]](), time.monotonic()
        self._most = FIRST_HELD
        if look is not None:
            look()

    def __enter__(self) -> HeldBack:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
        with suppress(*((LoraRocmError, OSError, RuntimeError, MemoryError) if failed else ())):
            self.settle()

    def add(self, keep: Callable[[], None]) -> None:
        """Add a result; ``keep`` writes it."""
        if self._look is None:
            keep()
            return
        self._held.append(keep)
        if len(self._held) >= self._most or time.monotonic() - self._since >= MOST_HELD_S:
            self.settle()
            self._most = min(2 * self._most, MOST_HELD)

    def settle(self) -> None:
        """Run the check, then keep the held results.

        Raises:
            CanaryError: the check failed; the held results are discarded.
        """
        held, self._held, self._since = self._held, [], time.monotonic()
        if held and self._look is not None:
            self._look()
        for keep in held:
            keep()
