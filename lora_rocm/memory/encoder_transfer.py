"""Encoders that do not fit into the GPU's memory: their repeated layers stay in main memory and are streamed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lora_rocm.device.allocator import LimitFollower, empty_pools, room_bytes
from lora_rocm.device.device_memory import free_bytes
from lora_rocm.device.transfer import DeviceTransfer, whole_fingerprints
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.hardware.settings import Settings
from lora_rocm.memory.offload import Offload, frozen_tensors
from lora_rocm.memory.op_counter import taken_bytes
from lora_rocm.rundir.run_context import RunContext

ENCODING_BYTES = 768 * 2**20
"""Memory beside the weights: activations of one caption of 512 tokens, workspaces of the libraries, fragmentation."""


class EncoderTransfer(DeviceTransfer):
    """Sends encoders whole if they fit, else all of them but their repeated layers.

    These layers stay in main memory and are fetched one ahead of the computation (``Offload``), in the same precision
    and with the same bits. Each fetch is checked.

    Args:
        free: asks for the memory of the device that further tensors may take, at each encoder; None: too little, as has
            been seen.
        pin: keep the layers that stay in pinned memory.
        context: receives a sentence for each encoder that is streamed.
        how: arguments of ``DeviceTransfer``.
    """

    def __init__(
        self, device: torch.device, pin: bool, free: Callable[[], int] | None, context: RunContext, **how: Any
    ) -> None:
        super().__init__(device, pin=pin, **how)
        self._pin, self._free, self._context, self._how = pin, free, context, how
        self._streams = False

    def send_parameters(self, module: nn.Module, component: str, staying: Collection[int] = ()) -> None:
        """As ``DeviceTransfer.send_parameters``; see the class for the tensors that stay."""
        layers, weight_bytes = repeated_layers(module), _bytes_of([module])
        now = self._free() if self._free is not None else None
        fits = now is not None and weight_bytes + ENCODING_BYTES <= now
        if fits or not layers:
            super().send_parameters(module, component, staying)
            return
        room = "ran out" if now is None else f"has {size_text(now)} free"
        self._context.notice(
            f"{component} takes {size_text(weight_bytes)}, and the GPU's memory {room}: main memory keeps "
            f"{count_text(len(layers), 'layer')} ({size_text(_bytes_of(layers))}), streamed to the GPU for each sample."
            " Precision and results are the same."
        )
        self._streams = True
        in_layers = {id(tensor) for layer in layers for tensor in frozen_tensors(layer)}
        super().send_parameters(module, component, {*staying, *in_layers})
        Offload(layers, self, self._pin)  # its hooks in the layers keep it alive

    def streaming(self) -> EncoderTransfer | None:
        """A transfer that streams; None: this one has done so already."""
        if self._streams:
            return None
        return EncoderTransfer(self.device, self._pin, None, self._context, **self._how)

    def changed(self, fingerprints: Callable[[Sequence[Tensor], int], Tensor] = whole_fingerprints) -> list[str]:
        """As ``DeviceTransfer.changed``, and a name for streamed layers of which any fetch arrived changed."""
        return super().changed(fingerprints) + (["streamed layers"] if bool(self.bad) else [])


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the outermost ``nn.ModuleList`` with most weights; empty if there is none."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in module.modules():
        if isinstance(each, nn.ModuleList) and each not in inside:
            inside |= set(each.modules())
            found = max(found, list(each), key=_bytes_of)
    return found


def free_for_encoder(device: torch.device, settings: Settings) -> int:
    """Bytes of a GPU that further tensors may take: within the limit of now, and what other programs leave."""
    empty_pools()
    LimitFollower(device, settings).renew()
    return max(0, min(free_bytes(device), room_bytes(device, settings) - torch.cuda.memory_allocated(device)))


def _bytes_of(modules: Sequence[nn.Module]) -> int:
    return sum(taken_bytes(t.numel() * t.element_size()) for module in modules for t in frozen_tensors(module))
