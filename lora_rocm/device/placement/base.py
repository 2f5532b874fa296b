"""The protocol of a placement, and the plainest one: all weights stay on the device.

A placement owns frozen weights from the moment they are sent. It alone knows where their bytes are, how they come back
for use, what they were on the host, and how much of the device they take. Packed weights (``kernels.weight_format``)
are parameters and buffers like any others, so every placement takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lora_rocm.device.allocator import taken_bytes
from lora_rocm.device.host_threads import threads_of_one_core
from lora_rocm.device.transfer import GROUP_BYTES, HOST_THREADS, DeviceTransfer, groups_alike, whole_fingerprints

Ask = Callable[[Sequence[Tensor], int], Tensor]
"""Computes fingerprints of tensors on the device, like ``whole_fingerprints``."""


@dataclass(frozen=True)
class Sent:
    """Dtype and fingerprint that a tensor had on the host when it was sent."""

    dtype: torch.dtype
    fingerprint: int


class Placement(Protocol):
    """The location of frozen weights.

    ``changed`` compares the weights that stay on the device. Weights fetched for use are compared at every fetch; a
    difference sets ``transfer.bad``.
    """

    @property
    def transfer(self) -> DeviceTransfer:
        """Copies to the device, and has the verdict on fetched weights."""

    def place(self, module: nn.Module, component: str) -> None:
        """Send a module's weights; each is compared with its bytes on the host before use.

        Trained weights go to the device in any case.

        Raises:
            TransferError: a tensor did not arrive by any method.
        """

    def fetch(self, block: nn.Module) -> None:
        """Prepare the frozen weights of a block for use on the device. It does not synchronise."""

    def release(self, block: nn.Module) -> None:
        """The weights of a block are not used until they are fetched again."""

    def fingerprints(self) -> Mapping[str, Sent]:
        """Every frozen tensor as it was on the host, by name ("unet.conv_in.weight"), wherever it is now."""

    def on_device(self) -> Mapping[str, Tensor]:
        """The frozen tensors that stay on the device, by name."""

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        """Names of frozen tensors on the device with changed bytes; synchronises once."""

    def bytes_on_device(self) -> int:
        """Bytes of frozen weights that the device holds, memory for fetched ones included."""

    def streaming(self) -> Placement | None:
        """A placement for the same modules that takes less of the device's memory; None: there is none."""


class Resident:
    """Keeps all weights on the device. Implements ``Placement``; others do so for the weights that they leave there."""

    def __init__(self, transfer: DeviceTransfer) -> None:
        self.transfer = transfer
        self._sent: dict[str, Sent] = {}
        self._here: dict[str, Tensor] = {}

    def place(self, module: nn.Module, component: str) -> None:
        self.send(module, component)

    def send(self, module: nn.Module, component: str, staying: Collection[int] = ()) -> None:
        """As ``Placement.place``. Tensors with an ``id`` in ``staying`` are fingerprinted, but not moved."""
        named = {f"{component}.{path}": t for path, t in (*module.named_parameters(), *module.named_buffers())}
        names, tensors = list(named), list(named.values())
        alike = groups_alike(tensors, GROUP_BYTES[self.transfer.device.type == "cuda"])
        groups = [[names[index] for index in group] for group in alike]

        def on_host(group: Sequence[str]) -> list[int]:
            found: list[int] = whole_fingerprints([named[name].data for name in group], 0).tolist()
            return found

        with threads_of_one_core(HOST_THREADS) as ahead:  # read the next tensors while a group is copied and compared
            for group, sums in zip(groups, ahead.map(on_host, groups), strict=True):
                expected = dict(zip(group, sums, strict=True))
                moving = {name: named[name].data for name in group if id(named[name]) not in staying}
                for name, arrived in self.transfer.send_alike(moving, expected).items():
                    named[name].data = arrived
                for name in group:
                    if not named[name].requires_grad:
                        self._sent[name] = Sent(named[name].dtype, expected[name])
                        if name in moving:
                            self._here[name] = named[name]
                del moving  # frees the host's copies before the next group is waited for

    def give_up(self, ids: Collection[int]) -> None:
        """Forget the tensors with these ``id``s, because they leave the device."""
        self._here = {name: tensor for name, tensor in self._here.items() if id(tensor) not in ids}

    def fetch(self, block: nn.Module) -> None:
        """Nothing to do: the weights are there."""

    def release(self, block: nn.Module) -> None:
        """Nothing to do: the weights stay."""

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
    """The frozen weights and buffers of modules, each once."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return list({id(tensor): tensor for tensor in tensors if not tensor.requires_grad}.values())


def frozen_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes that an allocator will count for the frozen weights of modules; they may be on the meta device."""
    return sum(taken_bytes(tensor.numel() * tensor.element_size()) for tensor in frozen_tensors(modules))
