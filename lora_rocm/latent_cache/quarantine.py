"""What encoders make is kept back until a look at kernels and weights has found all well; only then it is written.

A kernel that gives wrong answers would otherwise poison the cache for good: an entry says that it is what the encoder
made, not that this was right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch

from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import LoraRocmError, StoppedError

OpenDoor = Callable[[torch.device], DeviceTransfer]
Look = Callable[[DeviceTransfer], None]
"""Raises where kernels, or the weights that came through this door, are not what they should be."""

FIRST_HELD = 1  # entries; then twice as many each time: a start that soon fails has kept some
MOST_HELD = 64  # some 40 MB of images of 1024x1024
MOST_HELD_S = 60.0  # what a power failure may cost


def plain_door(device: torch.device) -> DeviceTransfer:
    """A door to a device that nothing is planned for."""
    return DeviceTransfer(device, pin=False)


class HeldBack:
    """Work whose results are kept once a look has found all well. Without a look they are kept at once.

    At the end of a ``with`` block it settles, also where a stop was asked for, or the work failed: then that error is
    the one to be told, and what the look or the disk says too (a device that is lost fails at whatever comes next)
    only costs what is held.

    Args:
        look: called before the first result is made, and before results are kept.
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
        """One result; ``keep`` writes it."""
        if self._look is None:
            keep()
            return
        self._held.append(keep)
        if len(self._held) >= self._most or time.monotonic() - self._since >= MOST_HELD_S:
            self.settle()
            self._most = min(2 * self._most, MOST_HELD)

    def settle(self) -> None:
        """Look, then keep what is held.

        Raises:
            CanaryError: something is wrong; what was held is thrown away.
        """
        held, self._held, self._since = self._held, [], time.monotonic()
        if held and self._look is not None:
            self._look()
        for keep in held:
            keep()
