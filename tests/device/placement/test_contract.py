"""Properties of every placement: the bytes sent come back, changed bytes are found, counted sizes are true.

A placement takes part by a row in ``KINDS``. The last row is a toy, unknown to shared code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.device.allocator import PIECE_BYTES
from lora_rocm.device.placement.base import Ask, Placement, Resident, Sent, frozen_bytes, frozen_tensors
from lora_rocm.device.placement.offloaded import Offload, Offloaded
from lora_rocm.device.placement.streamed import Streamed
from lora_rocm.device.transfer import (
    DeviceTransfer,
    copy_to_device,
    position_table,
    whole_fingerprint,
    whole_fingerprints,
)
from lora_rocm.errors import TransferError
from lora_rocm.families.base import LoadedModel
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.weight_format import is_packed, pack
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.planning.step_plan import WORKSPACE_BYTES, resident_bytes
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train.base_seal import seals_of

CPU = torch.device("cpu")
WIDTH, BLOCKS = 128, 4
FORMATS = ("none", "int8", "nf4")


class Net(nn.Module):
    """Frozen blocks of one size, with buffers; a frozen layer before them, and a trained one behind."""

    def __init__(self, stored: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
            for _ in range(BLOCKS)
        )
        self.requires_grad_(False)
        self.last = nn.Linear(WIDTH, 4)
        pack(self, quantised(stored, r"(^|\.)layers\.\d+\."))

    @property
    def parts(self) -> list[nn.Module]:
        return [self.first, *self.layers]

    def bytes_of(self) -> dict[str, Tensor]:
        """A copy of every frozen tensor, by name."""
        named = (*self.named_parameters(), *self.named_buffers())
        return {name: tensor.detach().clone() for name, tensor in named if not tensor.requires_grad}


class Sharded:
    """A toy: each of two devices has one half of every frozen tensor, and a fetch joins them."""

    def __init__(self, transfer: DeviceTransfer) -> None:
        self.transfer, self._rest = transfer, Resident(transfer)
        self.halves: dict[int, list[Tensor]] = {}
        self._known: dict[int, tuple[str, list[int], torch.Size]] = {}

    def place(self, module: nn.Module, component: str) -> None:
        self._rest.place(module, component)
        for name, tensor in self._rest.on_device().items():
            self.halves[id(tensor)] = [half.clone() for half in tensor.data.reshape(-1).tensor_split(2)]
            sums = [int(whole_fingerprint(half)) for half in self.halves[id(tensor)]]
            self._known[id(tensor)] = (name, sums, tensor.shape)
            tensor.data = tensor.data.new_empty(0)
        self._rest.give_up(set(self.halves))

    def fetch(self, block: nn.Module) -> None:
        for tensor in frozen_tensors([block]):
            name, _, shape = self._known[id(tensor)]
            tensor.data = torch.cat(self.halves[id(tensor)]).view(shape)
            if int(whole_fingerprint(tensor.data)) != self.fingerprints()[name].fingerprint:
                self.transfer.bad.fill_(1.0)

    def release(self, block: nn.Module) -> None:
        for tensor in frozen_tensors([block]):
            tensor.data = tensor.data.new_empty(0)

    def fingerprints(self) -> Mapping[str, Sent]:
        return self._rest.fingerprints()

    def on_device(self) -> Mapping[str, Tensor]:
        return {
            f"{name}, half {number}": half
            for key, (name, _, _) in self._known.items()
            for number, half in enumerate(self.halves[key])
            if len(half)
        }

    def changed(self, ask: Ask = whole_fingerprints) -> list[str]:
        halves = self.on_device()
        known = [
            known
            for key, (_, sums, _) in self._known.items()
            for known, half in zip(sums, self.halves[key], strict=True)
            if len(half)
        ]
        found = ask(list(halves.values()), 0).tolist()
        return [name for name, one, other in zip(halves, found, known, strict=True) if one != other]

    def bytes_on_device(self) -> int:
        """Of both devices, which are one here."""
        return sum(half.nbytes for both in self.halves.values() for half in both)

    def streaming(self) -> None:
        return None


@dataclass
class Kind:
    """How to place a net, the location of its bytes, and how many bytes are not on the device."""

    make: Callable[[DeviceTransfer, Net], Any]
    stored: Callable[[Any], list[Tensor]]
    host_bytes: Callable[[Any], int] = lambda placement: 0
    offloads: bool = False


def host_memory(offloads: list[Offload]) -> list[Tensor]:
    return [waiting.host for offload in offloads for waiting in offload._waiting]


KINDS = {
    "resident": Kind(lambda transfer, net: Resident(transfer), lambda placement: [*placement.on_device().values()]),
    "offloaded": Kind(
        lambda transfer, net: Offloaded(transfer, lambda: list(net.layers), pin=False),
        lambda placement: [*placement.on_device().values(), *host_memory([placement.offload])],
        lambda placement: placement.offload.host_bytes,
        True,
    ),
    "streamed": Kind(
        lambda transfer, net: Streamed(lambda: transfer, lambda: 0, False, NOBODY),
        lambda placement: [*placement.on_device().values(), *host_memory(placement._offloads)],
        lambda placement: sum(offload.host_bytes for offload in placement._offloads),
        True,
    ),
    "sharded": Kind(lambda transfer, net: Sharded(transfer), lambda placement: [*placement.on_device().values()]),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_format = pytest.mark.parametrize("stored", FORMATS)


def placed(kind: Kind, net: Net, transfer: DeviceTransfer | None = None) -> Placement:
    """The placement of a net, in use."""
    placement: Placement = kind.make(transfer or DeviceTransfer(CPU, pin=False), net)
    placement.place(net, "net")
    if isinstance(placement, Offloaded):
        placement.hold()
    return placement


def found(placement: Placement, net: Net) -> bool:
    """Whether the use of all weights, or a check of the ones on the device, finds a change."""
    for part in net.parts:
        placement.fetch(part)
        placement.release(part)
    return bool(placement.transfer.bad) or bool(placement.changed())


@every_format
@every_kind
def test_a_fetch_gives_the_bytes_that_were_sent(kind: Kind, stored: str) -> None:
    net = Net(stored)
    assert any(map(is_packed, net.modules())) == (stored != "none")
    wanted = net.bytes_of()
    placement = placed(kind, net)
    for _ in range(2):  # what was released comes back
        for name, part in {"first": net.first, **{f"layers.{n}": layer for n, layer in enumerate(net.layers)}}.items():
            placement.fetch(part)
            named = (*part.named_parameters(name), *part.named_buffers(name))
            for path, tensor in named:
                assert (tensor.dtype, tensor.shape) == (wanted[path].dtype, wanted[path].shape)
                assert torch.equal(tensor.detach(), wanted[path]), path
            placement.release(part)
    assert not placement.transfer.bad and placement.changed() == []


@every_format
@every_kind
def test_a_changed_byte_is_found_wherever_it_lies(kind: Kind, stored: str) -> None:
    count = len(kind.stored(placed(kind, Net(stored))))
    for index in {0, count // 2, count - 1}:
        net = Net(stored)
        placement = placed(kind, net)
        assert not found(placement, net), "the control"
        memory = kind.stored(placement)[index].data.reshape(-1)
        assert memory.data_ptr() == kind.stored(placement)[index].data_ptr(), "it is no copy"
        memory.view(torch.uint8)[memory.nbytes // 2] ^= 4
        assert found(placement, net), index


@every_kind
def test_a_byte_that_changes_on_the_way_is_sent_again_or_refused(kind: Kind) -> None:
    """Of one tensor on its first way; on all methods; and on none, which is the control."""
    for faults in (0, 1, 99):
        net, times = Net(), [faults]
        wanted = net.bytes_of()["first.weight"]

        def copy(tensor: Tensor, device: torch.device, method: str, times: list[int] = times) -> Tensor:
            arrived = copy_to_device(tensor, device, method).clone()
            if tensor.shape == (WIDTH, 8) and times[0]:
                times[0] -= 1
                arrived[3, 4] = -arrived[3, 4]
            return arrived

        transfer = DeviceTransfer(CPU, pin=False, copy=copy)
        if faults == 99:
            with pytest.raises(TransferError) as caught:
                placed(kind, net, transfer)
            assert caught.value.code == "transfer-failed" and "net.first.weight" in caught.value.where
            continue
        placement = placed(kind, net, transfer)
        placement.fetch(net.first)
        assert transfer.failures == faults and torch.equal(net.first.weight, wanted)


@every_format
@every_kind
def test_the_counted_bytes_are_what_the_device_holds(kind: Kind, stored: str) -> None:
    placed(kind, Net(stored))  # makes tables that stay
    with Ledger(iter([position_table(CPU)])) as ledger:
        net = Net(stored)
        placement = placed(kind, net)
        for part in net.parts:  # a fetch takes nothing that was not counted, and that its release does not give back
            placement.fetch(part)
            placement.release(part)
        trained = sum(p.nbytes for p in net.parameters() if p.requires_grad)
        held = ledger.live_bytes - kind.host_bytes(placement) - trained
    counted, tensors = placement.bytes_on_device(), len(placement.fingerprints())
    rounding = PIECE_BYTES * (2 * tensors + BLOCKS)
    assert counted <= held <= counted + rounding
    if kind.offloads:
        resident = sum(tensor.nbytes for tensor in placement.on_device().values())
        assert held - resident > rounding, "the control: the memory of fetched weights is seen"


@every_format
@every_kind
def test_seals_do_not_depend_on_where_weights_are(kind: Kind, stored: str) -> None:
    net = Net(stored)
    names = {f"net.{name}" for name in net.bytes_of()}
    found = placed(kind, net).fingerprints()
    plain = placed(KINDS["resident"], Net(stored)).fingerprints()
    assert found.keys() == names and "net.last.weight" not in found
    assert found == plain and seals_of(found) == seals_of(plain)
    other = Net(stored)
    other.first.weight.data[0, 0] += 1
    assert seals_of(placed(kind, other).fingerprints()) != seals_of(plain), "the control"


@every_format
def test_the_plan_counts_as_the_placement_does(stored: str) -> None:
    """Beforehand, on the meta device, and from the real one."""
    net = Net(stored).to("meta")
    blocks = [SimpleNamespace(weight_bytes=frozen_bytes([layer])) for layer in net.layers]
    weights = {"weight_bytes": frozen_bytes([net]), "blocks": blocks}
    footprint: Any = SimpleNamespace(**weights, adapter_bytes=-WORKSPACE_BYTES)
    tensors = len(frozen_tensors([net]))
    for kind, offloaded in (("resident", ()), ("offloaded", range(BLOCKS))):
        placement = placed(KINDS[kind], Net(stored))
        planned = resident_bytes(footprint, list(offloaded))
        assert planned <= placement.bytes_on_device() <= planned + PIECE_BYTES * tensors


def test_a_model_knows_its_placement() -> None:
    parts = {"net": Net(), "other": nn.Linear(3, 3).requires_grad_(False)}
    model = LoadedModel(parts, torch.float32, torch.device("meta"))
    assert model.placement is None
    placement = Resident(DeviceTransfer(CPU, pin=False))
    model.place(placement)
    assert model.placement is placement and model.device == CPU
    assert {"net.first.weight", "other.weight"} <= placement.fingerprints().keys()
