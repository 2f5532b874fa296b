"""Inputs of recomputed blocks in main memory: the same gradients bit for bit, few on the device, each checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.block_inputs import BlockInputs, copy_bytes, movable
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.planning.step_plan import IN_FLIGHT, SLOTS

CPU, META = torch.device("cpu"), torch.device("meta")
BLOCKS, ROWS, WIDTH = 6, 8, 64
INPUT_BYTES = ROWS * WIDTH * 4
SHARED_BYTES = WIDTH * 4
"""The first block cannot know that the others are given this too, so it is moved once."""
SENT = BLOCKS + 1
"""Copies to main memory in a pass."""
Run = Callable[..., Any]


class Block(nn.Module):
    """A block of two streams that gives out two views of one tensor, and is given a third tensor as all others are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, text: Tensor, image: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, ...]:
        joined = torch.cat([text, image])
        return (joined + self.net(joined) * shared * scale).split([len(text), len(image)])


class Net(nn.Module):
    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.to(device)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
        self.x = x

    def loss(self, run: Run, watch: Callable[[Tensor], None] = lambda tensor: None) -> Tensor:
        text, image = self.first(self.x).split([len(self.x) // 4, len(self.x) - len(self.x) // 4])
        shared = self.shared(self.x[:1])
        for block in self.blocks:
            watch(text if text._base is None else text._base)
            text, image = run(block, text, image, shared, scale=0.5)
        return image.square().sum()

    def gradients(self, run: Run) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(run), list(self.parameters())))


class Copies:
    """Copies as usual, and changes a byte of chosen copies: of those that leave, or of those that come back."""

    def __init__(self, *changed: int) -> None:
        self.changed, self.count = set(changed), 0

    def __call__(self, place: Tensor, source: Tensor) -> None:
        copy_bytes(place, source)
        if self.count in self.changed:
            place[INPUT_BYTES - 3] ^= 64  # the text, at the begin, has no gradient
        self.count += 1


class Fixture:
    def __init__(self, *changed: int, device: torch.device = CPU) -> None:
        self.net, self.copies = Net(device), Copies(*changed)
        self.model = LoadedModel({"net": self.net}, torch.float32, device)
        self.transfer = DeviceTransfer(device, pin=device.type == "cuda")
        self.inputs = BlockInputs(list(self.net.blocks), self.transfer, pin=device.type == "cuda", copy=self.copies)
        self.run = Recomputing(self.model, inputs=self.inputs)

    def plain(self) -> list[Tensor]:
        return self.net.gradients(Recomputing(self.model))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    yield CPU if request.param == "cpu" else torch.device("cuda", 0)


def test_gradients_are_the_same_to_the_bit_in_each_pass(device: torch.device) -> None:
    rig = Fixture(device=device)
    wanted = rig.plain()
    for number in range(1, 4):
        assert same(rig.net.gradients(rig.run), wanted)
        assert rig.inputs.moved_bytes == number * (BLOCKS * INPUT_BYTES + SHARED_BYTES)
    assert rig.inputs.host_bytes == BLOCKS * INPUT_BYTES + SHARED_BYTES
    assert rig.inputs.slot_bytes == SLOTS * INPUT_BYTES + SHARED_BYTES
    assert not rig.transfer.bad and rig.transfer.checks == 3 * (SENT - IN_FLIGHT)


@pytest.mark.parametrize("which", [0, SENT - IN_FLIGHT - 1, SENT, SENT + 2])
def test_a_copy_that_changes_a_byte_is_found(which: int) -> None:
    """The first copies go to main memory, the others come back; each whole input is one copy."""
    rig = Fixture(which)
    wanted = rig.plain()
    assert not same(rig.net.gradients(rig.run), wanted)
    assert rig.transfer.bad
    rig.transfer.clear()
    assert same(rig.net.gradients(rig.run), wanted) and not rig.transfer.bad, "the control: the next pass is right"


def test_a_copy_that_does_not_happen_is_found() -> None:
    """Then main memory holds the input of the pass before."""
    rig = Fixture()
    rig.net.gradients(rig.run)
    rig.net.x = rig.net.x + 1
    rig.copies.changed, copies = set(), rig.inputs._copy
    rig.inputs._copy = lambda place, source: None if rig.copies.count == 99 else copies(place, source)
    rig.copies.count = 99
    rig.net.gradients(rig.run)
    assert rig.transfer.bad


def test_few_inputs_are_on_the_device() -> None:
    rig = Fixture()
    alive: list[weakref.ref[Any]] = []
    loss = rig.net.loss(rig.run, lambda tensor: alive.append(weakref.ref(tensor.untyped_storage())))
    assert sum(each() is not None for each in alive) <= IN_FLIGHT
    alive.clear()
    loss.backward()
    plain = rig.net.loss(Recomputing(rig.model), lambda tensor: alive.append(weakref.ref(tensor.untyped_storage())))
    assert sum(each() is not None for each in alive) == BLOCKS, "the control"
    plain.backward()


def test_a_pass_that_was_interrupted_changes_nothing_in_the_next() -> None:
    rig = Fixture()
    wanted = rig.plain()
    for _ in range(2):
        rig.net.loss(rig.run)  # no backward pass
    assert same(rig.net.gradients(rig.run), wanted)
    calls: list[int] = []

    def fails(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == BLOCKS // 2:
            raise MemoryError
        return rig.run(block, *args, **kwargs)

    with pytest.raises(MemoryError):
        rig.net.gradients(fails)
    assert same(rig.net.gradients(rig.run), wanted) and not rig.transfer.bad


def test_a_larger_sample_gets_more_memory_and_a_smaller_one_uses_a_part_of_it() -> None:
    rig = Fixture()
    x = rig.net.x
    for rows in (2, 1, 4):
        rig.net.x = x.repeat(rows, 1)
        assert same(rig.net.gradients(rig.run), rig.plain())
    assert rig.inputs.slot_bytes <= SLOTS * (4 * INPUT_BYTES + SHARED_BYTES) and not rig.transfer.bad


def test_what_all_blocks_are_given_stays(device: torch.device) -> None:
    net = Net(device)
    given = [net.first(net.x), net.shared(net.x[:1])]
    refs = [weakref.ref(each) for each in given]
    assert list(movable(given)) == [0, 1]
    assert not movable(given, refs)
    assert list(movable([net.x, None, given[0]], refs[1:])) == [2], "an input of the model is no output of a block"
    assert not movable([given[0].t()[:3], given[0].expand(2, -1, -1)]), "what has gaps, or overlaps, stays"
    assert not movable([given[0].flatten()[:24] * 1]), "fingerprints are of 64 bytes each, and this has 96"


@pytest.mark.gpu
def test_a_captured_pass_moves_its_inputs() -> None:
    device = torch.device("cuda", 0)
    rig = Fixture(device=device)
    wanted = rig.plain()
    for parameter, gradient in zip(rig.net.parameters(), wanted, strict=True):
        parameter.grad = torch.zeros_like(gradient)
    for _ in range(2):
        rig.net.loss(rig.run).backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        rig.net.loss(rig.run).backward()
    for parameter in rig.net.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    before = rig.transfer.bad.item()
    graph.replay()
    torch.cuda.synchronize()
    found = [parameter.grad for parameter in rig.net.parameters() if parameter.grad is not None]
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True)) and not before
    assert not rig.transfer.bad
    rig.inputs._hosts[0].zero_()  # each replay sends the inputs again
    graph.replay()
    torch.cuda.synchronize()
    assert not rig.transfer.bad
