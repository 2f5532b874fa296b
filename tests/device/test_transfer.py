"""The guard: every injected corruption is caught, every clean batch passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_rocm.device import transfer as transfers
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import METHODS, DeviceTransfer, copy_to_device, fingerprint, whole_fingerprint
from lora_rocm.errors import TransferError

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def sample_tensor(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """[3, 4, 16, 16] with every sample different."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.int64:
        return torch.randint(-(2**40), 2**40, (3, 4, 16, 16), generator=generator)
    return torch.randn(3, 4, 16, 16, generator=generator).to(dtype)


def all_zeros(tensor: Tensor, previous: Tensor) -> Tensor:
    return torch.zeros_like(tensor)


def half_zeroed(tensor: Tensor, previous: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[changed.numel() // 2 :] = 0
    return changed


def one_sample_zeroed(tensor: Tensor, previous: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[1] = 0
    return changed


def stale(tensor: Tensor, previous: Tensor) -> Tensor:
    return previous.clone()


def tiles_swapped(tensor: Tensor, previous: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[..., 0:4, 0:4], changed[..., 8:12, 8:12] = tensor[..., 8:12, 8:12], tensor[..., 0:4, 0:4]
    return changed


def samples_swapped(tensor: Tensor, previous: Tensor) -> Tensor:
    return tensor.flip(0)


def shifted_by_one(tensor: Tensor, previous: Tensor) -> Tensor:
    return tensor.reshape(-1).roll(1).view_as(tensor)


def one_bit_flipped(tensor: Tensor, previous: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[2, 3, 5, 7] ^= 1
    return changed


def one_nan(tensor: Tensor, previous: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[0, 0, 0, 0] = float("nan") if changed.is_floating_point() else -(2**63)
    return changed


FAULTS = [
    all_zeros,
    half_zeroed,
    one_sample_zeroed,
    stale,
    tiles_swapped,
    samples_swapped,
    shifted_by_one,
    one_bit_flipped,
    one_nan,
]


class FaultyBus:
    """A copy that spoils chosen tensors; ``broken_methods`` are the rungs of the ladder that it spoils."""

    def __init__(
        self, fault: Callable[[Tensor, Tensor], Tensor], broken_methods: tuple[str, ...], spoil_last: bool = False
    ):
        self.fault, self.broken, self.spoil_last = fault, broken_methods, spoil_last
        self.previous: dict[tuple[object, ...], Tensor] = {}
        self.armed = True

    def __call__(self, tensor: Tensor, device: torch.device, method: str) -> Tensor:
        identity = (tensor.dtype, tuple(tensor.shape))
        previous = self.previous.get(identity, torch.zeros_like(tensor))
        self.previous[identity] = tensor.clone()
        is_expectation = tensor.dtype is torch.int64 and tensor.ndim == 2
        if not self.armed or method not in self.broken or (is_expectation and not self.spoil_last):
            return copy_to_device(tensor, device, method)
        return self.fault(tensor, previous)


def send(transfer: DeviceTransfer, tensor: Tensor) -> bool:
    """True where the batch was found to be clean."""
    transfer.clear()
    transfer.send({"x": tensor}, {"x": fingerprint(tensor)})
    return not bool(transfer.bad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_caught_and_clean_batches_pass(fault: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    bus = FaultyBus(fault, METHODS)
    transfer = DeviceTransfer(CPU, pin=False, copy=bus)
    bus.armed = False
    assert send(transfer, sample_tensor(dtype, seed=1))
    bus.armed = True
    assert not send(transfer, sample_tensor(dtype, seed=2))
    bus.armed = False  # negative control: the same road without the fault
    assert send(transfer, sample_tensor(dtype, seed=2))


@pytest.mark.parametrize("fault", [all_zeros, stale], ids=lambda fault: fault.__name__)
def test_data_and_expectation_spoiled_together_do_not_agree(fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    bus = FaultyBus(fault, METHODS, spoil_last=True)
    transfer = DeviceTransfer(CPU, pin=False, copy=bus)
    bus.armed = False
    assert send(transfer, sample_tensor(torch.float32, seed=1))
    bus.armed = True
    assert not send(transfer, sample_tensor(torch.float32, seed=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_legitimately_zero_tensor_passes(dtype: torch.dtype) -> None:
    assert send(DeviceTransfer(CPU, pin=False), torch.zeros(2, 77, 5).to(dtype))


def test_nan_and_negative_zero_are_compared_as_bytes() -> None:
    tensor = torch.tensor([[float("nan"), -0.0, 0.0, float("inf")]])
    assert send(DeviceTransfer(CPU, pin=False), tensor)
    assert fingerprint(tensor) != fingerprint(tensor.abs())


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]),
    seed=st.integers(0, 2**31),
    bit=st.integers(0, 7),
)
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_changes_exactly_its_sample(shape: list[int], dtype: torch.dtype, seed: int, bit: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (4, *shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)[..., 0]
    before = fingerprint(tensor)
    flipped = raw.clone()
    place = int(torch.randint(0, raw[0].numel(), (), generator=generator))
    flipped[2].view(-1)[place] ^= 1 << bit
    after = fingerprint(flipped.view(dtype)[..., 0])
    assert (before != after).tolist() == [False, False, True, False]


def test_a_sample_has_the_same_fingerprint_alone_and_in_a_batch() -> None:
    batch = sample_tensor(torch.float32)
    assert fingerprint(batch).tolist() == [int(fingerprint(sample[None])) for sample in batch]


def test_large_tensors_are_read_in_chunks_and_to_the_last_byte() -> None:
    tensor = torch.arange(3 * 2**20 + 5, dtype=torch.float32)
    known = whole_fingerprint(tensor)
    for place in (0, 2**20, 2 * 2**20 - 1, tensor.numel() - 1):
        changed = tensor.clone()
        changed[place] += 1
        assert whole_fingerprint(changed) != known
    chunks_swapped = torch.cat([tensor[2**20 : 2 * 2**20], tensor[: 2**20], tensor[2 * 2**20 :]])
    assert whole_fingerprint(chunks_swapped) != known


def test_the_ladder_ends_with_an_error_that_names_the_methods() -> None:
    transfer = DeviceTransfer(CPU, pin=False, copy=FaultyBus(all_zeros, METHODS))
    assert transfer.method == "unpinned"
    transfer.failed("a")
    assert transfer.method == "clone"
    transfer.failed("a")
    assert transfer.method == "chunked"
    with pytest.raises(TransferError, match="unpinned, clone, chunked"):
        transfer.failed("samples a, b")


def test_after_three_failures_the_method_stays_lower() -> None:
    transfer = DeviceTransfer(CPU, pin=True)
    for _ in range(3):
        assert transfer.method == "pinned"
        transfer.failed("a")
        transfer.succeeded()
    assert transfer.method == "unpinned"


def test_every_method_copies_the_same_bytes() -> None:
    tensor = torch.randn(3, 2**20 + 3)
    for method in METHODS[1:]:
        assert torch.equal(copy_to_device(tensor, CPU, method), tensor)


@pytest.mark.parametrize("broken", [METHODS[1:2], METHODS], ids=["first method", "all methods"])
def test_weights_are_checked_after_loading(broken: tuple[str, ...]) -> None:
    module = nn.Linear(64, 64)
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    transfer = DeviceTransfer(CPU, pin=False, copy=FaultyBus(half_zeroed, broken))
    if len(broken) == len(METHODS):
        with pytest.raises(TransferError, match="changed"):
            Resident(transfer).place(module, "net")
        return
    Resident(transfer).place(module, "net")
    assert transfer.failures == 2 and transfer.checks == 4
    assert all(torch.equal(module.state_dict()[name], value) for name, value in wanted.items())


def alike(count: int) -> nn.ModuleDict:
    """Layers of one shape, each with other weights."""
    layers = {f"{number}": nn.Linear(8, 8) for number in range(count)}
    return nn.ModuleDict(layers).requires_grad_(False)


@pytest.mark.parametrize("broken", [METHODS[1:2], METHODS], ids=["first method", "all methods"])
def test_of_weights_that_are_compared_together_the_changed_one_is_sent_again(broken: tuple[str, ...]) -> None:
    module = alike(20)
    wanted = {name: value.clone() for name, value in module.state_dict().items()}

    def copy(tensor: Tensor, device: torch.device, method: str) -> Tensor:
        arrived = copy_to_device(tensor, device, method).clone()
        if method in broken and torch.equal(tensor, wanted["7.weight"]):
            arrived[3, 4] = -arrived[3, 4]
        return arrived

    transfer = DeviceTransfer(CPU, pin=False, copy=copy)
    if broken == METHODS:
        with pytest.raises(TransferError, match=r"net\.7\.weight \(8, 8\)"):
            Resident(transfer).place(module, "net")
        return
    placement = Resident(transfer)
    placement.place(module, "net")
    assert (transfer.failures, transfer.checks) == (1, 41)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in wanted.items())
    assert placement.changed() == []
    module["7"].weight[0, 0] += 1
    assert placement.changed() == ["net.7.weight"]


def test_many_weights_of_one_shape_take_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Tensor]()

    def counted(tensor_B: Tensor) -> Tensor:
        calls.append(tensor_B)
        return fingerprint(tensor_B)

    monkeypatch.setattr(transfers, "fingerprint", counted)
    placement = Resident(DeviceTransfer(CPU, pin=False))
    placement.place(alike(50), "net")
    assert placement.changed() == []
    assert len(calls) == 3 * 2, "weights and biases: on the host, where they arrived, and later"


def test_weights_have_the_same_fingerprints_together_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    shapes = ((3, 5), (7,), (3, 5), (), (7,), (3, 5))
    tensors = [torch.randn(shape, generator=rng).to(dtype) for shape in shapes for dtype in DTYPES]
    tensors.insert(3, torch.randn(2**20 + 3, generator=rng))
    wanted = [int(whole_fingerprint(tensor)) for tensor in tensors]
    for most_bytes in (transfers.GROUP_BYTES[False], 130, 0):
        monkeypatch.setattr(transfers, "GROUP_BYTES", {False: most_bytes, True: most_bytes})
        assert transfers.whole_fingerprints(tensors, 0).tolist() == wanted


class Mapped(nn.Module):
    """A module with weights in a mapped file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        wanted = torch.arange(2.0**16).reshape(256, 256)
        save_file({"weight": wanted}, folder / "weights.safetensors")
        with safe_open(folder / "weights.safetensors", "pt") as file:
            self.weight = nn.Parameter(file.get_tensor("weight"), requires_grad=False)


def is_mapped(tensor: Tensor) -> bool:
    """Whether its first byte is in a mapped .safetensors file."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(".safetensors")
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("heap_copy", [True, False])
def test_with_heap_copy_no_mapped_weight_is_left(heap_copy: bool, tmp_path: Path) -> None:
    module = Mapped(tmp_path)
    assert is_mapped(module.weight)
    Resident(DeviceTransfer(CPU, pin=False, heap_copy=heap_copy)).place(module, "net")
    assert is_mapped(module.weight) == (not heap_copy)  # on a CPU a copy straight from the file is none at all
    assert torch.equal(module.weight, torch.arange(2.0**16).reshape(256, 256))


def test_with_heap_copy_only_methods_that_copy_first_are_used() -> None:
    used: list[str] = []

    def copy(tensor: Tensor, device: torch.device, method: str) -> Tensor:
        used.append(method)
        return torch.zeros_like(tensor)

    with pytest.raises(TransferError):
        DeviceTransfer(CPU, pin=True, copy=copy, heap_copy=True).send_checked(torch.ones(4), "weight")
    assert used == ["pinned", "clone", "chunked"]


class FaultyReads:
    """Reads that come back spoiled, the first ``times`` times."""

    def __init__(self, times: int, fault: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.times, self.fault = times, fault

    def __call__(self, tensor: Tensor) -> Tensor:
        self.times -= 1
        good = tensor.detach().clone()
        return self.fault(good, torch.ones_like(good)) if self.times >= 0 else good


@pytest.mark.parametrize("fault", [all_zeros, half_zeroed, stale], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_what_comes_back_is_checked_and_read_again(times: int, fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    tensors = {"weight": sample_tensor(torch.float32), "step": torch.tensor(7.0)}
    transfer = DeviceTransfer(CPU, pin=False, read=FaultyReads(times, fault))
    if times == 3:
        with pytest.raises(TransferError, match="copied back"):
            transfer.receive(tensors)
        return
    received = transfer.receive(tensors)
    assert transfer.failures == times
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    assert received["weight"].data_ptr() != tensors["weight"].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_gpu_fingerprints_equal_the_host_ones(method: str, dtype: torch.dtype) -> None:
    tensor = sample_tensor(dtype)
    arrived = copy_to_device(tensor, torch.device("cuda", 0), method)
    assert fingerprint(arrived).tolist() == fingerprint(tensor).tolist()
    large = torch.randn(3 * 2**20 + 5).to(dtype)
    assert int(whole_fingerprint(copy_to_device(large, torch.device("cuda", 0), method))) == int(
        whole_fingerprint(large)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_gpu_faults_are_caught(fault: Callable[[Tensor, Tensor], Tensor]) -> None:
    device = torch.device("cuda", 0)
    bus = FaultyBus(lambda t, previous: fault(t.cpu(), previous.cpu()).to(device), METHODS)
    transfer = DeviceTransfer(device, pin=True, copy=bus)
    bus.armed = False
    assert send(transfer, sample_tensor(torch.float32, seed=1))
    bus.armed = True
    assert not send(transfer, sample_tensor(torch.float32, seed=2))
