"""No fault of a copy reaches an optimizer step, of any kind, and nothing that arrived well is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.captured_step import captured_faults
from benchmarks.faults import KINDS, TARGETS
from benchmarks.faulty_training import UncheckedTransfer, faulty_steps, make_batch
from benchmarks.reliable_transfers import CONTENTS, EXPONENTS, WHOLE, clean_sends, main, odd_batch, odd_tensor
from lora_rocm.device import transfer
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device, fingerprint
from lora_rocm.errors import NonFiniteError

CPU = torch.device("cpu")


@pytest.mark.parametrize("faults", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_no_fault_reaches_the_optimizer_and_the_states_are_those_of_a_run_without(faults: int) -> None:
    found = faulty_steps(faults, CPU, seed=2)
    assert found.caught.total() == faults and not found.reached and not found.differing and not found.false_alarms
    assert found.compared > 2 * faults
    assert {kind for kind, _ in found.caught} == set(KINDS) and {target for _, target in found.caught} == set(TARGETS)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_check_each_kind_does_harm(kind: str) -> None:
    """Negative control: the same run without the check."""
    choice = {"kinds": (kind,), "targets": ("data",)}
    if kind == "one_nan":  # the check of loss and gradient defers it, but cannot do better than continue
        with pytest.raises(NonFiniteError):
            faulty_steps(12, CPU, 3, UncheckedTransfer, **choice)
        return
    found = faulty_steps(12, CPU, 3, UncheckedTransfer, **choice)
    assert found.differing and not found.caught


@pytest.mark.parametrize("kind", ["swapped_samples", "swapped_tensors"])
def test_data_and_fingerprints_that_were_exchanged_together_do_not_agree(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = {"kinds": (kind,), "targets": ("both",)}
    assert faulty_steps(12, CPU, 4, **choice).caught.total() == 12
    monkeypatch.setattr(transfer, "salted", lambda prints_KB, salt: prints_KB ^ salt)
    assert faulty_steps(12, CPU, 4, **choice).reached  # negative control: one salt for all places


def test_each_single_bit_of_a_send_is_noticed() -> None:
    tensors = {name: make_batch(5, 0)[name][:2] for name in ("time_ids", "weight")}
    tensors |= {
        "pooled": torch.randn(2, 3).to(torch.bfloat16),
        "mask": torch.tensor([[1, 0, 1]] * 2, dtype=torch.uint8),
    }
    expected = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    flipped: list[int] = []  # number of the copy, byte, bit

    def copy(tensor: Tensor, device: torch.device, method: str) -> Tensor:
        arrived = copy_to_device(tensor, device, method).clone()
        if copies[0] == flipped[0]:
            arrived.reshape(-1).view(torch.uint8)[flipped[1]] ^= 1 << flipped[2]
        copies[0] += 1
        return arrived

    copies, door = [0], DeviceTransfer(CPU, pin=False, copy=copy)
    sizes = [*(tensor.nbytes for tensor in tensors.values()), 8 * 2 * len(tensors)]  # and the fingerprints themselves
    for number, size in enumerate(sizes):
        for place in range(size):
            for bit in range(8):
                flipped[:], copies[0] = [number, place, bit], 0
                door.send(tensors, expected)
                assert bool(door.bad), flipped
                door.clear()
    flipped[:], copies[0] = [-1, 0, 0], 0  # negative control
    door.send(tensors, expected)
    assert not bool(door.bad)


@pytest.mark.parametrize("sends", [500, pytest.param(3000, marks=pytest.mark.slow)])
def test_nothing_that_arrives_well_is_refused(sends: int) -> None:
    assert clean_sends(sends, CPU, seed=6)[0] == 0


def test_what_looks_odd_is_compared_as_strictly() -> None:
    """Negative control: one bit of the same tensors flipped."""
    generator = torch.Generator().manual_seed(7)
    for dtype in (*EXPONENTS, *WHOLE):
        for content in CONTENTS:
            tensor = odd_tensor(content, dtype, (2, 9), generator)
            expected = fingerprint(tensor)
            tensor.view(torch.uint8)[1, -1] ^= 1
            door = DeviceTransfer(CPU, pin=False)
            door.send({"x": tensor}, {"x": expected})
            assert bool(door.bad), (dtype, content)


def test_the_odd_tensors_are_what_they_are_called() -> None:
    generator = torch.Generator().manual_seed(8)
    made = {content: odd_tensor(content, torch.float32, (500,), generator) for content in CONTENTS}
    assert not made["all zero"].any() and torch.signbit(made["-0"]).all() and not made["-0"].any()
    assert not made["NaN with payloads"].isfinite().any()
    assert len(made["NaN with payloads"].view(torch.int32).unique()) > 400
    assert (made["denormal"].abs() < torch.finfo(torch.float32).tiny).all() and made["denormal"].any()
    assert {dtype for number in range(200) for dtype in [t.dtype for t in odd_batch(number, 1).values()]} == {
        *EXPONENTS,
        *WHOLE,
    }


@pytest.mark.parametrize("faults", [45, pytest.param(360, marks=pytest.mark.slow)])
def test_a_step_over_static_buffers_holds_the_parameters_back_by_itself(faults: int) -> None:
    """The body of the captured CUDA graph, here without a graph: nothing is read between the copies and the
    next step.
    """
    found = captured_faults(faults, CPU, seed=9)
    assert found.caught.total() == faults and not found.reached and not found.differing and not found.false_alarms
    assert {kind for kind, _ in found.caught} == set(KINDS)
    unchecked = captured_faults(12, CPU, 9, UncheckedTransfer)  # negative control
    assert unchecked.reached.total() == 12 and not unchecked.caught


def test_the_script_tells_and_fails_where_something_came_through(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--faulty", "24", "--clean", "20"]
    assert main(few) == 0 and "24 faults, 24 caught, 0 reached the optimizer" in capsys.readouterr().out
    monkeypatch.setattr(DeviceTransfer, "compare", UncheckedTransfer.compare)
    assert main(few) == 1


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield torch.device("cuda", 0)
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_gpu_no_fault_reaches_the_optimizer(deterministic: torch.device) -> None:
    found = faulty_steps(240, deterministic, seed=2)
    assert found.caught.total() == 240 and not found.reached and not found.differing and not found.false_alarms


@pytest.mark.gpu
def test_gpu_a_captured_step_holds_the_parameters_back_by_itself(deterministic: torch.device) -> None:
    found = captured_faults(240, deterministic, seed=2)
    assert found.caught.total() == 240 and not found.reached and not found.differing and not found.false_alarms
    assert captured_faults(36, deterministic, 2, UncheckedTransfer).reached.total() == 36


@pytest.mark.gpu
def test_gpu_nothing_that_arrives_well_is_refused(deterministic: torch.device) -> None:
    assert clean_sends(2000, deterministic, seed=6)[0] == 0
