"""The fingerprints of frozen weights by one launch. Here a graph is a function that runs again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.checks.canary import Canary, CapturedFingerprints
from lora_rocm.checks.selftest_base import WrongAnswerError
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer, whole_fingerprints

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu, id="gpu")]


class Recorder:
    """Captures; ``runs``: whether a replay does anything."""

    def __init__(self) -> None:
        self.captured, self.replays, self.runs = 0, 0, True

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            if self.runs:
                work()

        return replay


def tensors(device: torch.device = CPU) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(shape, generator=generator) for shape in ((3,), (7, 5), (2, 3, 3, 3), (1300, 1024))]
    return [tensor.to(device, torch.bfloat16) for tensor in found]


@pytest.mark.parametrize("device", DEVICES)
def test_says_what_launches_one_by_one_say_and_launches_once(device: torch.device) -> None:
    captured = CapturedFingerprints() if device is GPU else CapturedFingerprints(Recorder())
    weights = tensors(device)
    for salt in (1, 2**62 + 1, 77):
        assert torch.equal(captured(weights, salt), whole_fingerprints(weights, salt))
    weights[2].view(torch.int16)[0, 0, 0, 0] ^= 1
    changed_K = captured(weights, 9) != whole_fingerprints(tensors(device), 9)
    assert changed_K.tolist() == [False, False, True, False]


def test_weights_that_have_moved_are_captured_again() -> None:
    recorder, weights = Recorder(), tensors()
    captured = CapturedFingerprints(recorder)
    for moved in (False, False, True, False):
        if moved:
            weights[1].data = weights[1].clone()
        captured(weights, 5)
    assert (recorder.captured, recorder.replays) == (2, 4)


def test_a_new_graph_that_does_not_run_is_not_believed() -> None:
    recorder = Recorder()
    recorder.runs = False
    with pytest.raises(WrongAnswerError, match="captured graph"):
        CapturedFingerprints(recorder)(tensors(), 5)


@pytest.mark.parametrize("runs", [True, False], ids=["runs", "runs no more"])
def test_a_replay_that_does_not_happen_leaves_no_good_answer(runs: bool) -> None:
    placement, recorder = Resident(DeviceTransfer(CPU, pin=False)), Recorder()
    placement.place(nn.Linear(4, 3).requires_grad_(False), "base")
    captured = CapturedFingerprints(recorder)
    assert placement.changed(captured) == [] and placement.changed(captured) == []
    recorder.runs = runs
    assert placement.changed(captured) == ([] if runs else ["base.weight", "base.bias"])


def test_the_canary_captures_its_look_at_weights() -> None:
    placement, recorder = Resident(DeviceTransfer(CPU, pin=False)), Recorder()
    layer = nn.Linear(4, 3).requires_grad_(False)
    placement.place(layer, "base")
    canary = Canary(CPU, torch.float32, 4, placement, capture=recorder)
    assert [canary.failure() for _ in range(3)] == [None] * 3
    assert recorder.captured == 3 + 1  # a new one to try at each check, and one of the weights
    layer.weight.data[0, 0] += 1
    found = canary.failure()
    assert found is not None and found.code == "canary-weights" and "base.weight" in found.where
    recorder.runs = False
    found = canary.failure()
    assert found is not None and found.code == "canary-graph"
