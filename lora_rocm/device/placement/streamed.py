"""A placement for encoders that exceed the GPU's memory: their repeated layers stay in main memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lora_rocm.device.allocator import LimitFollower, empty_pools, room_bytes
from lora_rocm.device.device_memory import free_bytes
from lora_rocm.device.placement.base import Ask, Resident, frozen_bytes, frozen_tensors
from lora_rocm.device.placement.offloaded import Offload
from lora_rocm.device.transfer import DeviceTransfer, whole_fingerprints
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.hardware.settings import Settings
from lora_rocm.rundir.run_context import RunContext

ENCODING_BYTES = 768 * 2**20
"""Memory needed in addition to the weights: activations for a caption of 512 tokens, workspaces of libraries, and
fragmentation.
"""


class Streamed(Resident):
    """Sends an encoder to the GPU as a whole if it fits, otherwise without its repeated layers.

    The repeated layers then stay in main memory. Each is fetched while the layer before it computes (``Offload``), in
    the same precision and with the same bits. Each fetch is checked. Implements ``Placement``.

    Args:
        open_transfer: opens a new transfer to the device.
        free: returns the device memory that further tensors may use; called for each encoder. None if memory has
            already run out; in this case every encoder is streamed.
        pin: whether layers in main memory are kept in pinned memory.
        context: receives a notice for each encoder that is streamed.
    """

    def __init__(
        self,
        open_transfer: Callable[[], DeviceTransfer],
        free: Callable[[], int] | None,
        pin: bool,
        context: RunContext,
    ) -> None:
        super().__init__(open_transfer())
        self._open_transfer, self._free, self._pin, self._context = open_transfer, free, pin, context
        self._offloads: list[Offload] = []
        self._streams = False

    def place(self, module: nn.Module, component: str) -> None:
        """Send an encoder as ``Placement.place`` does. If it does not fit, its repeated layers stay in main memory."""
        layers, weight_bytes = repeated_layers(module), frozen_bytes([module])
        now = self._free() if self._free is not None else None
        fits = now is not None and weight_bytes + ENCODING_BYTES <= now
        if fits or not layers:
            self.send(module, component)
            return
        room = "the memory ran out" if now is None else f"only {size_text(now)} are free"
        self._context.notice(
            f"{component} does not fit into the GPU's memory: it takes {size_text(weight_bytes)}, and {room}. So "
            f"{count_text(len(layers), 'layer')} ({size_text(frozen_bytes(layers))}) stay in main memory and are "
            "copied to the GPU for each sample. Precision and results are the same."
        )
        self._streams = True  # also if memory runs out while it is placed
        self.send(module, component, {id(tensor) for tensor in frozen_tensors(layers)})
        self._offloads.append(Offload(layers, self, self._pin))

    def fetch(self, block: nn.Module) -> None:
        for offload in self._offloads:
            offload.fetch(block)

    def release(self, block: nn.Module) -> None:
        for offload in self._offloads:
            offload.release(block)

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        """Return the names of changed tensors, and "streamed layers" if any fetched layer failed its check."""
        return super().changed(ask) + (["streamed layers"] if bool(self.transfer.bad) else [])

    def bytes_on_device(self) -> int:
        return super().bytes_on_device() + sum(offload.slot_bytes for offload in self._offloads)

    def streaming(self) -> Streamed | None:
        """Return a placement that always streams, or None if this one has already streamed an encoder."""
        return None if self._streams else Streamed(self._open_transfer, None, self._pin, self._context)


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the ``nn.ModuleList`` with the most weight bytes, or an empty list if there is none.

    Lists inside other lists are ignored.
    """
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in module.modules():
        if isinstance(each, nn.ModuleList) and each not in inside:
            inside |= set(each.modules())
            found = max(found, list(each), key=frozen_bytes)
    return found


def free_for_encoder(device: torch.device, settings: Settings) -> int:
    """Bytes of GPU memory that further tensors may use: the current limit, less the memory of other programs."""
    empty_pools()
    LimitFollower(device, settings).renew()
    return max(0, min(free_bytes(device), room_bytes(device, settings) - torch.cuda.memory_allocated(device)))
