"""A graph that sets no memory or does not run is noticed. Here a graph is a function that runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.checks.canary import SCALES, Canary
from lora_rocm.checks.graph_check import capture_on_gpu, captured_sums
from lora_rocm.checks.selftest_base import WrongAnswerError
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer

CPU = torch.device("cpu")
FORMATS = [torch.float32, torch.float16, torch.bfloat16]


class NoMemset(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.zero_.default else func(*args, **(kwargs or {}))


def without_memset(work: Callable[[], None]) -> Callable[[], None]:
    def replay() -> None:
        with NoMemset():
            work()

    return replay


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_a_sound_graph_passes(dtype: torch.dtype, scale: float) -> None:
    captured_sums(CPU, dtype, scale, capture=lambda work: work)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("capture", [without_memset, lambda work: lambda: None], ids=["no memset", "does not run"])
def test_a_wrong_graph_does_not(dtype: torch.dtype, capture: Any) -> None:
    with pytest.raises(WrongAnswerError, match="captured graph"):
        captured_sums(CPU, dtype, 1.0, capture)


def test_the_canary_looks_at_graphs_only_where_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    monkeypatch.setattr(
        "lora_rocm.checks.canary.captured_sums", lambda device, dtype, scale, capture: looked.append(scale)
    )
    plain = Canary(CPU, torch.float32, 4, Resident(DeviceTransfer(CPU, pin=False)))
    assert plain.failure() is None and looked == [] and "captured graph" not in plain.checks
    uses = Canary(CPU, torch.float32, 4, Resident(DeviceTransfer(CPU, pin=False)), capture=capture_on_gpu)
    assert uses.failure() is None and looked == [1.0] and "captured graph" in uses.checks


@pytest.mark.parametrize("error", [WrongAnswerError("off"), RuntimeError("operation not permitted when capturing")])
def test_a_graph_that_is_wrong_or_cannot_be_captured_fails_the_canary(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*how: Any) -> None:
        raise error

    monkeypatch.setattr("lora_rocm.checks.canary.captured_sums", fails)
    found = Canary(CPU, torch.float32, 4, Resident(DeviceTransfer(CPU, pin=False)), capture=capture_on_gpu).failure()
    assert found is not None and found.code == "canary-graph" and str(error) in found.where
    assert "runtime.graphs" in found.fix


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_gpu_graphs_compute(dtype: torch.dtype) -> None:
    for scale in SCALES:
        captured_sums(torch.device("cuda", 0), dtype, scale)
