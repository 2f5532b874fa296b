"""``Encoding`` describes how a run fills its caches. ``PendingWrites`` delays results until a check passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from lora_rocm.dataset.progress import Report, ignore
from lora_rocm.device.placement.base import Placement, Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.encoded_cache.cache import MISSING, LatentCache
from lora_rocm.errors import LoraRocmError, StoppedError
from lora_rocm.rundir.event_types import RepairedEvent
from lora_rocm.rundir.run_context import NOBODY, RunContext

if TYPE_CHECKING:
    from lora_rocm.encoded_cache.prefetch import BackgroundWriter
    from lora_rocm.families.base import Encoder, Tensors


OpenPlacement = Callable[[torch.device], Placement]
Look = Callable[[Placement], None]
"""Check of a placement: raises an error if kernels are faulty, or if the weights in the placement are corrupt."""
FIRST_HELD = 1  # entries; doubled each time, so that a run that fails early has written some
MOST_HELD = 64  # entries: some 40 MB for images of 1024x1024
MOST_HELD_S = 60.0  # the most work that a power failure may cost


def plain_placement(device: torch.device) -> Placement:
    """Return a placement that keeps all weights on the device, and transfers them from unpinned memory."""
    return Resident(DeviceTransfer(device, pin=False))


class PendingWrites:
    """Delays writing results until a check of kernels and weights passes. Without a check, writes them at once.

    If it wrote before the check, a faulty kernel would corrupt the cache permanently. A fingerprint proves that an
    entry is the encoder's output, but not that the output is correct.

    The end of a ``with`` block calls ``settle``, even after a stop request or an error. If the block failed, its error
    propagates. Further errors of the check or the disk are suppressed, because a lost device fails at every call. The
    pending results are then lost.

    Args:
        check: the check, or None. It is called at construction, and before results are written.
    """

    def __init__(self, check: Callable[[], None] | None) -> None:
        self._check, self._held, self._since = check, list[Callable[[], None]](), time.monotonic()
        self._most = FIRST_HELD
        if check is not None:
            check()

    def __enter__(self) -> PendingWrites:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, StoppedError)
        with suppress(*((LoraRocmError, OSError, RuntimeError, MemoryError) if failed else ())):
            self.settle()

    def add(self, keep: Callable[[], None]) -> None:
        """Add a pending result. ``keep``: function that writes the result."""
        if self._check is None:
            keep()
            return
        self._held.append(keep)
        if len(self._held) >= self._most or time.monotonic() - self._since >= MOST_HELD_S:
            self.settle()
            self._most = min(2 * self._most, MOST_HELD)

    def settle(self) -> None:
        """Run the check, then write the pending results.

        Raises:
            CanaryError: the check failed. The pending results are discarded.
        """
        held, self._held, self._since = self._held, [], time.monotonic()
        if held and self._check is not None:
            self._check()
        for keep in held:
            keep()


@dataclass
class Encoding:
    """Settings of a run for filling its caches: cache, device and callbacks.

    report: callback for the progress.
    context: run context. It receives an event if an encoder moves to the CPU or to tiles, and for each damaged entry
        that is encoded again.
    tiles: whether image encoders work in tiles; set after running out of memory.
    opened_placement: function that opens a placement on a device, which stores weights and transfers inputs and
        results.
    check: function that raises an error if kernels are faulty or the encoder's weights are corrupt; None for no check.
        It is called before the first encode and before each batch of entries is written (see ``PendingWrites``), but
        not if nothing is encoded.
    more: additional encoders, which run after the family's.
    """

    cache: LatentCache
    device: torch.device
    report: Report = ignore
    context: RunContext = NOBODY
    tiles: bool = False
    opened_placement: OpenPlacement = plain_placement
    check: Look | None = None
    more: Sequence[Encoder] = ()

    def pending_writes(self, placement: Callable[[], Placement]) -> PendingWrites:
        """Return a ``PendingWrites`` for an encoder's results, which runs ``check`` on the encoder's placement."""
        look = self.check
        return PendingWrites(None if look is None else lambda: look(placement()))

    def write_in_background(
        self, background: BackgroundWriter, entry: str, key: str, tensors: Tensors, item: str, fault: str
    ) -> None:
        """Check, fingerprint and write an entry in another thread. Emits an event if it replaces a damaged entry."""

        def report_repair() -> None:
            if fault != MISSING:
                self.context.emit(RepairedEvent(kind=entry, item=item, reason=fault))

        background.add(partial(self.cache.write_tensors, entry, key, tensors, item), report_repair)
