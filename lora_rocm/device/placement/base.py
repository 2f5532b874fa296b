"""The protocol of a placement, and the simplest placement, which keeps all weights on the device.

A placement manages frozen weights from the moment they are sent. It alone knows where their bytes are, how they are
fetched for use, which bytes they had on the host, and how much device memory they take. Packed weights
(``kernels.weight_format``) are ordinary parameters and buffers, so every placement supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lora_rocm.device.allocator import taken_bytes
from lora_rocm.device.host_threads import threads_of_one_core
from lora_rocm.device.transfer import (
    GROUP_BYTES,
    HOST_THREADS,
    DeviceTransfer,
    Sending,
    groups_alike,
    whole_fingerprints,
)

Ask = Callable[[Sequence[Tensor], int], Tensor]
"""Function that computes fingerprints of tensors on the device. It has the signature of ``whole_fingerprints``."""


@dataclass(frozen=True)
class Sent:
    """Dtype and fingerprint of a frozen tensor on the host, taken when it was sent."""

    dtype: torch.dtype
    fingerprint: int


class Placement(Protocol):
    """Decides where frozen weights are kept, and checks them.

    ``changed`` checks the weights that stay on the device. Weights that are fetched for use are checked at every fetch,
    and a difference sets ``transfer.bad``.
    """

    @property
    def transfer(self) -> DeviceTransfer:
        """The transfer that copies to the device. Its ``bad`` shows whether a fetched weight was wrong."""

    def place(self, module: nn.Module, component: str) -> None:
        """Send a module's weights to the device, or keep them in main memory; each is checked before use.

        Trained weights always go to the device. ``component``: prefix of the weights' names.

        Raises:
            TransferError: every transfer method delivered a tensor with changed bytes.
        """

    def fetch(self, block: nn.Module) -> None:
        """Make a block's frozen weights available on the device. Does not synchronise."""

    def release(self, block: nn.Module) -> None:
        """Declare that a block's weights will not be used until they are fetched again."""

    def fingerprints(self) -> Mapping[str, Sent]:
        """Return dtype and fingerprint of every frozen tensor on the host, by name ("unet.conv_in.weight")."""

    def on_device(self) -> Mapping[str, Tensor]:
        """Return the frozen tensors that stay on the device, by name."""

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        """Return the names of the frozen tensors on the device with changed bytes. Synchronises once.

        ``ask``: computes the fingerprints.
        """

    def bytes_on_device(self) -> int:
        """Return the device memory for frozen weights in bytes, including the memory reserved for fetched ones."""

    def streaming(self) -> Placement | None:
        """Return a placement for the same modules that needs less device memory, or None if there is none."""


class Resident:
    """Keeps all weights on the device. Implements ``Placement``.

    Other placements inherit from it, to manage the part of the weights that they keep on the device.
    """

    def __init__(self, transfer: DeviceTransfer) -> None:
        self.transfer = transfer
        self._sent: dict[str, Sent] = {}
        self._here: dict[str, Tensor] = {}

    def place(self, module: nn.Module, component: str) -> None:
        self.send(module, component)

    def send(self, module: nn.Module, component: str, staying: Collection[int] = ()) -> None:
        """Send a module's weights as ``Placement.place`` does.

        ``staying``: ids of tensors that are fingerprinted but not moved.
        """
        named = {f"{component}.{path}": t for path, t in (*module.named_parameters(), *module.named_buffers())}
        names, tensors = list(named), list(named.values())
        alike = groups_alike(tensors, GROUP_BYTES[self.transfer.device.type == "cuda"])
        groups = [[names[index] for index in group] for group in alike]

        def on_host(group: Sequence[str]) -> list[int]:
            found: list[int] = whole_fingerprints([named[name].data for name in group], 0).tolist()
            return found

        def end(group: Sequence[str], sending: Sending) -> None:
            for name, arrived in self.transfer.end_alike(sending).items():
                named[name].data = arrived
            for name in group:
                if not named[name].requires_grad:
                    self._sent[name] = Sent(named[name].dtype, sending.expected[name])
                    if name in sending.arrived:
                        self._here[name] = named[name]

        # Threads read the next tensors while one group is copied and the group before it is checked
        with threads_of_one_core(HOST_THREADS) as ahead, ThreadPoolExecutor(1) as freeing:
            under_way = list[tuple[Sequence[str], Sending]]()
            for group, sums in zip(groups, ahead.map(on_host, groups), strict=True):
                moving = {name: named[name].data for name in group if id(named[name]) not in staying}
                under_way.append((group, self.transfer.begin_alike(moving, dict(zip(group, sums, strict=True)))))
                del moving
                if len(under_way) > 1:
                    before, sending = under_way.pop(0)
                    end(before, sending)
                    freeing.submit(sending.tensors.clear)  # the system takes as long to take memory back as to copy it
                    del sending
            for before, sending in under_way:
                end(before, sending)

    def give_up(self, ids: Collection[int]) -> None:
        """Stop tracking the tensors with these ids, because they leave the device."""
        self._here = {name: tensor for name, tensor in self._here.items() if id(tensor) not in ids}

    def fetch(self, block: nn.Module) -> None:
        """Do nothing: the weights are already on the device."""

    def release(self, block: nn.Module) -> None:
        """Do nothing: the weights stay on the device."""

    def fingerprints(self) -> Mapping[str, Sent]:
        return self._sent

    def on_device(self) -> Mapping[str, Tensor]:
        return self._here

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        if not self._here:
            return []
        salt = self.transfer.next_salt()  # so that an old result cannot pass
        found_K = ask(list(self._here.values()), salt)
        self.transfer.checks += len(self._here)
        pairs = zip(self._here, found_K.tolist(), strict=True)  # one wait for all tensors
        return [name for name, found in pairs if found != self._sent[name].fingerprint ^ salt]

    def bytes_on_device(self) -> int:
        memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._here.values()}
        return sum(memory.nbytes() for memory in memories.values())

    def streaming(self) -> Placement | None:
        return None


def frozen_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the frozen parameters and buffers of modules, each only once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return list({id(tensor): tensor for tensor in tensors if not tensor.requires_grad}.values())


def frozen_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes that torch's allocator will count for the frozen weights of modules, which may be on the meta device."""
    return sum(taken_bytes(tensor.numel() * tensor.element_size()) for tensor in frozen_tensors(modules))
