"""A placement of encoders that do not fit into the GPU's memory: main memory keeps their repeated layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lora_rocm.device.allocator import LimitFollower, empty_pools, room_bytes
from lora_rocm.device.device_memory import free_bytes
from lora_rocm.device.placement.base import Ask, Resident, Sent, frozen_bytes
from lora_rocm.device.placement.offloaded import Offloaded
from lora_rocm.device.transfer import DeviceTransfer, whole_fingerprints
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.hardware.settings import Settings
from lora_rocm.rundir.run_context import RunContext

ENCODING_BYTES = 768 * 2**20
"""Memory beside the weights: activations of one caption of 512 tokens, workspaces of the libraries, fragmentation."""


class Streamed:
    """Sends encoders whole if they fit, else all of them but their repeated layers. Implements ``Placement``.

    These layers stay in main memory and are fetched one ahead of the computation (``Offloaded``), in the same precision
    and with the same bits. Each fetch is checked.

    Args:
        open_transfer: opens a new transfer to the device.
        free: asks for the memory of the device that further tensors may take, at each encoder; None: too little, as has
            been seen.
        pin: keep the layers that stay in pinned memory.
        context: receives a sentence for each encoder that is streamed.
    """

    def __init__(
        self,
        open_transfer: Callable[[], DeviceTransfer],
        free: Callable[[], int] | None,
        pin: bool,
        context: RunContext,
    ) -> None:
        self._open_transfer, self._free, self._pin, self._context = open_transfer, free, pin, context
        self._rest = Resident(open_transfer())
        self._streamed: list[Offloaded] = []

    @property
    def transfer(self) -> DeviceTransfer:
        return self._rest.transfer

    def place(self, module: nn.Module, component: str) -> None:
        """As ``Placement.place``; see the class for the weights that stay."""
        layers, weight_bytes = repeated_layers(module), frozen_bytes([module])
        now = self._free() if self._free is not None else None
        fits = now is not None and weight_bytes + ENCODING_BYTES <= now
        if fits or not layers:
            self._rest.place(module, component)
            return
        room = "ran out" if now is None else f"has {size_text(now)} free"
        self._context.notice(
            f"{component} takes {size_text(weight_bytes)}, and the GPU's memory {room}: main memory keeps "
            f"{count_text(len(layers), 'layer')} ({size_text(frozen_bytes(layers))}), streamed to the GPU for each "
            "sample. Precision and results are the same."
        )
        streamed = Offloaded(self._rest, lambda: layers, self._pin)
        self._streamed.append(streamed)  # also if memory runs out while it is placed
        streamed.place(module, component)
        streamed.hold()

    def fetch(self, block: nn.Module) -> None:
        for streamed in self._streamed:
            streamed.fetch(block)

    def release(self, block: nn.Module) -> None:
        for streamed in self._streamed:
            streamed.release(block)

    def fingerprints(self) -> Mapping[str, Sent]:
        return self._rest.fingerprints()

    def on_device(self) -> Mapping[str, Tensor]:
        return self._rest.on_device()

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        """As ``Placement.changed``, and a name for streamed layers of which any fetch arrived changed."""
        return self._rest.changed(ask) + (["streamed layers"] if bool(self.transfer.bad) else [])

    def bytes_on_device(self) -> int:
        slots = sum(each.offload.slot_bytes for each in self._streamed if each.offload is not None)
        return self._rest.bytes_on_device() + slots

    def streaming(self) -> Streamed | None:
        """A placement that streams; None: this one has done so already."""
        return None if self._streamed else Streamed(self._open_transfer, None, self._pin, self._context)


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the outermost ``nn.ModuleList`` with most weights; empty if there is none."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in module.modules():
        if isinstance(each, nn.ModuleList) and each not in inside:
            inside |= set(each.modules())
            found = max(found, list(each), key=frozen_bytes)
    return found


def free_for_encoder(device: torch.device, settings: Settings) -> int:
    """Bytes of a GPU that further tensors may take: within the limit of now, and what other programs leave."""
    empty_pools()
    LimitFollower(device, settings).renew()
    return max(0, min(free_bytes(device), room_bytes(device, settings) - torch.cuda.memory_allocated(device)))
