"""Weights that wait in main memory: the same bits, fetched in time, and every arriving weight checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.device.placement.base import Resident
from lora_rocm.device.placement.offloaded import ALIGNMENT_BYTES, Offload, Offloaded, copy_into
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.common.recompute import Recomputing, Run
from lora_rocm.kernels.frozen_conv import FrozenConv2d

CPU = torch.device("cpu")
WIDTH, BLOCKS, STEPS = 48, 6, 3
Copy = Callable[[Tensor, Tensor], None]


class Block(nn.Module):
    """A frozen layer with a trained one in parallel; the first has none, as the first layers of a model may."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH + number).requires_grad_(False)
        self.back = nn.Linear(WIDTH + number, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH, bias=False) if number else None
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.back(torch.tanh(self.base(x))) + self.shift
        return x + (y if self.trained is None else y + self.trained(x))


class Net(nn.Module):
    """Blocks in a row; ``run`` calls them while training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.run: Run = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x) if torch.is_grad_enabled() else block(x)
        return x


def prepared(
    device: torch.device, which: slice | None, copy: Copy = copy_into
) -> tuple[Net, DeviceTransfer, Offload | None]:
    net, transfer = Net(), DeviceTransfer(device, pin=device.type == "cuda")
    chosen = list(net.blocks[which]) if which is not None else []
    placement = Offloaded(transfer, lambda: chosen, device.type == "cuda", copy)
    placement.place(net, "net")
    net.run = Recomputing(LoadedModel({"net": net}, torch.float32, device))
    placement.hold()
    return net, transfer, placement.offload


def trained(net: Net, device: torch.device, steps: int = STEPS) -> list[Tensor]:
    """Weights and losses after steps of gradient descent, with a pass without gradients in between."""
    found = []
    for step in range(steps):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        loss = net(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    p.grad = None
            found += [loss.detach(), net(x).square().mean()]
    return [tensor.cpu() for tensor in [*found, *(p.detach() for p in net.parameters() if p.requires_grad)]]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2), slice(2, 3), slice(-1, None), slice(0, 1)])
def test_training_gives_the_same_bits(which: slice) -> None:
    net, transfer, offload = prepared(CPU, which)
    assert offload is not None
    assert same(trained(net, CPU), trained(prepared(CPU, None)[0], CPU))
    assert not transfer.bad
    assert transfer.checks > 0


def test_each_block_is_fetched_once_a_way() -> None:
    net, _, offload = prepared(CPU, slice(None))
    assert offload is not None
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        before = offload.fetched_bytes
        net(x).sum().backward()
        fetched = offload.fetched_bytes - before
        # forward all; backward not the last two, which are there still, nor the first, to which no gradient goes
        sizes = [waiting.host.numel() for waiting in offload._waiting]
        assert fetched == sum(sizes) + sum(sizes[1:-2])


class Faulty:
    """Copies, and spoils what ``spoil`` wants from the ``first`` fetch on; ``None`` for a copy that never happens."""

    def __init__(self, spoil: Callable[[Tensor], None] | None, first: int = 0) -> None:
        self.spoil, self.first, self.count = spoil, first, 0

    def __call__(self, place: Tensor, source: Tensor) -> None:
        self.count += 1
        if self.count <= self.first:
            copy_into(place, source)
        elif self.spoil is not None:
            copy_into(place, source)
            self.spoil(place)


def flip_one_bit(place: Tensor) -> None:
    place[place.numel() // 2] ^= 4


def clear(place: Tensor) -> None:
    place.zero_()


def shift(place: Tensor) -> None:
    place.copy_(place.roll(4))


FAULTS: dict[str, Callable[[Tensor], None] | None] = {
    "stale": None,
    "one bit": flip_one_bit,
    "zeroes": clear,
    "shifted": shift,
}


@pytest.mark.parametrize("first", [0, 3, BLOCKS + 2], ids=["first block", "forward", "backward"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_arrival_sets_the_verdict(fault: str, first: int) -> None:
    net, transfer, _ = prepared(CPU, slice(None), Faulty(FAULTS[fault], first))
    net(torch.randn(2, WIDTH)).sum().backward()
    assert transfer.bad == 1.0


def test_without_the_check_it_would_go_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the same fault changes the trained weights, and nothing else reports it."""
    monkeypatch.setattr(Offload, "_check", lambda self, index, place: None)
    net, transfer, _ = prepared(CPU, slice(None), Faulty(FAULTS["one bit"], 3))
    assert not same(trained(net, CPU), trained(prepared(CPU, None)[0], CPU))
    assert transfer.bad == 0.0


def test_a_fault_that_passed_is_gone_with_the_next_pass() -> None:
    """The host clears the verdict and sends the batch again: all weights are fetched again."""
    wanted = trained(prepared(CPU, None)[0], CPU)
    faulty = Faulty(flip_one_bit)
    net, transfer, _ = prepared(CPU, slice(None), faulty)
    net(torch.randn(2, WIDTH)).sum().backward()
    assert transfer.bad == 1.0
    net.zero_grad()
    transfer.clear()
    faulty.first = 10**9
    assert same(trained(net, CPU), wanted)
    assert transfer.bad == 0.0


def test_a_pass_that_was_broken_off_harms_none_after_it() -> None:
    net, transfer, _ = prepared(CPU, slice(None))
    for number in (1, 2, 4):
        handle = net.blocks[number].register_forward_pre_hook(_full)
        with pytest.raises(MemoryError):
            net(torch.randn(2, WIDTH))
        handle.remove()
    assert same(trained(net, CPU), trained(prepared(CPU, None)[0], CPU))
    assert not transfer.bad


def _full(module: nn.Module, args: Any) -> None:
    raise MemoryError


class Capturing:
    """Copies, except during the capture of a graph, when it does nothing. made: sizes of blocks that came."""

    def __init__(self) -> None:
        self.now, self.made = False, list[int]()

    def __call__(self, place: Tensor, source: Tensor) -> None:
        if not self.now:
            copy_into(place, source)
            self.made.append(source.numel())


@pytest.mark.parametrize(("number", "entry"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_a_capture_that_was_broken_off_leaves_nothing_that_a_pass_could_believe(number: int, entry: int) -> None:
    """The next pass begins at a different block than the interrupted one did."""
    copy = Capturing()
    net, transfer, _ = prepared(CPU, slice(1, None), copy)

    def passed() -> list[int]:
        copy.made.clear()
        net(torch.randn(2, WIDTH)).sum().backward()
        net.zero_grad()
        return list(copy.made)

    def full(module: nn.Module, args: Any) -> None:
        entries.append(1)
        if len(entries) == entry:
            raise MemoryError

    wanted, entries = passed(), list[int]()
    copy.now, handle = True, net.blocks[number].register_forward_pre_hook(full)
    with pytest.raises(MemoryError):
        passed()
    copy.now = False
    handle.remove()
    net.zero_grad()
    transfer.clear()  # here, where a capture computes too
    assert passed() == wanted == passed()
    assert same(trained(net, CPU), trained(prepared(CPU, None)[0], CPU))
    assert not transfer.bad


def test_what_waits_is_not_among_what_is_looked_at_on_the_device() -> None:
    net = Net()
    placement = Offloaded(DeviceTransfer(CPU, pin=False), lambda: list(net.blocks[:3]), pin=False)
    placement.place(net, "net")
    frozen = placement.on_device().keys()
    assert not any(name.startswith(("net.blocks.0.", "net.blocks.2.")) for name in frozen)
    assert "net.blocks.3.base.weight" in frozen and placement.changed() == []


def test_weights_that_were_sent_already_come_back() -> None:
    net, rest = Net(), Resident(DeviceTransfer(CPU, pin=False))
    rest.place(net, "net")
    net.run = Recomputing(LoadedModel({"net": net}, torch.float32, CPU))
    Offload(list(net.blocks), rest, pin=False)
    assert rest.on_device() == {}
    assert same(trained(net, CPU), trained(prepared(CPU, None)[0], CPU))


def test_closed_it_leaves_the_weights_as_they_were() -> None:
    net, _, offload = prepared(CPU, slice(None))
    assert offload is not None
    trained(net, CPU, steps=1)
    offload.close()
    assert all(torch.equal(a, b) for a, b in zip(_frozen(net), _frozen(Net()), strict=True))
    place = offload._places[0].zero_()
    assert place.sum() == 0 and all(tensor.abs().sum() > 0 for tensor in _frozen(net))


def _frozen(net: Net) -> list[Tensor]:
    return [t for t in [*net.parameters(), *net.buffers()] if not t.requires_grad]


class Merged(nn.Module):
    """Two weights that are parts of one, which a helper holds."""

    class Helper:
        def __init__(self, whole: Tensor) -> None:
            self.whole = whole

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.other = (nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(2))
        whole = torch.cat([self.one.weight.data, self.other.weight.data])
        self.one.weight.data, self.other.weight.data = whole.split(8)
        self.helper = Merged.Helper(whole)

    def forward(self, x: Tensor) -> Tensor:
        assert self.helper.whole.data_ptr() == self.one.weight.data_ptr()
        return torch.stack([x @ self.helper.whole.t(), torch.cat([self.one(x), self.other(x)], dim=-1)])


def test_weights_of_one_memory_stay_so_and_are_fetched_once() -> None:
    """One product and two add up the same eight numbers; in which order, the processor decides."""
    block = Merged()
    size, x = 2 * 8 * 8 * 4, torch.randn(3, 8)
    offload = Offload([block], Resident(DeviceTransfer(CPU, pin=False)), pin=False)
    merged, single = block(x)
    most = torch.finfo(torch.float32).eps * 8 * (x.abs() @ block.helper.whole.abs().t())  # two sums of eight, rounded
    assert ((merged - single).abs() <= most).all()
    assert ((merged - single.roll(8, dims=-1)).abs() > 100 * most).float().mean() > 0.9, "the control: places exchanged"
    assert offload.host_bytes == offload.fetched_bytes == size
    block.helper = Merged.Helper(torch.zeros(2))  # other memory is left alone
    assert Offload([block], Resident(DeviceTransfer(CPU, pin=False)), pin=False).host_bytes == size


def test_other_layouts_come_back_as_they_are() -> None:
    conv = nn.Conv2d(4, 6, 3).requires_grad_(False)
    conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)
    wanted, x = conv.weight.clone(), torch.randn(1, 4, 5, 5)
    before = conv(x)
    Offload([conv], Resident(DeviceTransfer(CPU, pin=False)), pin=False)
    assert torch.equal(conv(x), before)
    assert torch.equal(conv.weight, wanted) and conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_that_are_parts_of_something_larger_take_only_their_part() -> None:
    """As after an earlier offload, which stores blocks in one piece of memory, or after a file was read whole."""
    net, whole = Net(), torch.randn(1_000_000)
    layer = net.blocks[1].base
    layer.weight.data = whole[300:].as_strided(layer.weight.shape, (1, len(layer.weight)))
    wanted = trained(net, CPU)
    net, transfer = Net(), DeviceTransfer(CPU, pin=False)
    layer = net.blocks[1].base
    layer.weight.data = whole[300:].as_strided(layer.weight.shape, (1, len(layer.weight)))
    net.run = Recomputing(LoadedModel({"net": net}, torch.float32, CPU))
    first = Offload(list(net.blocks[:4]), Resident(transfer), pin=False)
    assert first.host_bytes < whole.numel()
    first.close()
    second = Offload(list(net.blocks), Resident(transfer), pin=False)
    alone = Offload(list(Net().blocks), Resident(DeviceTransfer(CPU, pin=False)), pin=False)
    assert second.host_bytes <= alone.host_bytes + 2 * ALIGNMENT_BYTES
    assert same(trained(net, CPU), wanted)


class ConvolvedLast(nn.Module):
    """A block that ends in an operation with nothing but a weight in its backward: nothing triggers its
    recomputation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Conv2d(2, 2, 1)
        self.last = FrozenConv2d(2, 2, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.last(torch.tanh(self.trained(x)))
        return output


@pytest.mark.parametrize("is_entered", [True, False])  # False: the control
def test_weights_that_are_all_a_block_needs_to_go_back_are_there(
    monkeypatch: pytest.MonkeyPatch, is_entered: bool
) -> None:
    net = Net()
    net.blocks = nn.ModuleList(ConvolvedLast() for _ in range(4))
    net.run = Recomputing(LoadedModel({"net": net}, torch.float32, CPU))
    if not is_entered:
        monkeypatch.setattr(Offload, "_left", lambda *_: None)
    offload = Offload(list(net.blocks), Resident(DeviceTransfer(CPU, pin=False)), False)
    places = {place.untyped_storage().data_ptr() for place in offload._places}
    convolve, were_there = F.conv_transpose2d, []

    def watched(gradient: Tensor, weight: Tensor, *how: Any) -> Tensor:
        were_there.append(weight.untyped_storage().data_ptr() in places)
        return convolve(gradient, weight, *how)

    monkeypatch.setattr(F, "conv_transpose2d", watched)
    for _ in range(2):
        net(torch.randn(1, 2, 8, 8)).sum().backward()
    assert len(were_there) == 8 and all(were_there) is is_entered


class Double(nn.Module):
    """A block of two streams: called by keyword, it returns both, one of them perhaps as it came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.block, self.number = Block(number), number

    def forward(self, *, text: Tensor, image: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        mixed = self.block(image) * scale + text
        return (mixed.tanh() if self.number % 2 else text), mixed


class DoubleNet(nn.Module):
    """Blocks that are called by keyword and return tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Double(number) for number in range(BLOCKS))
        self.recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        text, image = x * 0.5, x
        for block in self.blocks:
            how = {"text": text, "image": image, "scale": 0.7}
            if self.recomputes and torch.is_grad_enabled():
                text, image = checkpoint(block, use_reentrant=False, **how)
            else:
                text, image = block(**how)
        return text + image


@pytest.mark.parametrize("which", [slice(None), slice(1, None, 2)])
def test_blocks_called_by_keyword_that_return_tuples_train_to_the_same_bits(which: slice) -> None:
    plain, net, transfer = DoubleNet(), DoubleNet(), DeviceTransfer(CPU, pin=False)
    plain.recomputes = False
    offload = Offload(list(net.blocks[which]), Resident(transfer), pin=False)
    assert same(trained(net, CPU), trained(plain, CPU))
    assert not transfer.bad
    assert offload.fetched_bytes > offload.host_bytes


def test_inputs_given_by_keyword_decide_whether_a_block_is_entered_again() -> None:
    net = DoubleNet()
    for block in net.blocks:
        block.requires_grad_(False)
    offload = Offload(list(net.blocks), Resident(DeviceTransfer(CPU, pin=False)), pin=False)
    net(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    sizes = [waiting.host.numel() for waiting in offload._waiting]
    assert offload.fetched_bytes == sum(sizes) + sum(sizes[:-2])


@pytest.mark.gpu
@pytest.mark.parametrize("which", [slice(None), slice(1, None, 2)])
def test_on_a_gpu_eager_and_captured_give_the_bits_of_no_offload(which: slice) -> None:
    device = torch.device("cuda", 0)
    wanted = trained(prepared(device, None)[0], device)
    net, transfer, offload = prepared(device, which)
    assert offload is not None
    assert same(trained(net, device), wanted)
    x = torch.randn(5, WIDTH, device=device)
    leaves = [p for p in net.parameters() if p.requires_grad]
    eager = torch.autograd.grad(net(x).square().mean(), leaves)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(net(x).square().mean(), leaves)
    for _ in range(3):
        with torch.no_grad():
            net(x)  # moves the values in the places
        graph.replay()
    torch.cuda.synchronize()
    assert same(list(captured), list(eager))
    assert not transfer.bad


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # its first call in the thread of the backward pass
@pytest.mark.parametrize("fault", FAULTS)
def test_on_a_gpu_a_spoilt_arrival_sets_the_verdict(fault: str) -> None:
    device = torch.device("cuda", 0)
    net, transfer, _ = prepared(device, slice(None), Faulty(FAULTS[fault], 4))
    net(torch.randn(2, WIDTH, device=device)).sum().backward()
    assert float(transfer.bad) == 1.0


@pytest.mark.gpu
def test_on_a_gpu_many_passes_behind_each_other_see_no_place_that_is_filled_too_early() -> None:
    """Nothing is waited for between passes; large blocks, so that copies and computing overlap."""
    device = torch.device("cuda", 0)
    net, transfer, _ = prepared(device, slice(None))
    x = torch.randn(4096, WIDTH, device=device)
    losses = []
    for _ in range(50):
        loss = net(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    torch.cuda.synchronize()
    assert len(set(torch.stack(losses).tolist())) == 1
    assert not transfer.bad
