"""Wrong copies and memory that forgets are noticed in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.checks.selftest import run_check
from lora_rocm.checks.selftest_copies import METHODS, copy_checks, memory_checks
from lora_rocm.hardware.selftest_result import Result
from tests.wording import says

CPU = torch.device("cpu")
Damage = Callable[[Tensor, Tensor], Tensor]


def nothing(there: Tensor, before: Tensor) -> Tensor:
    return there


def zeros(there: Tensor, before: Tensor) -> Tensor:
    return torch.zeros_like(there)


def tail_of_zeros(there: Tensor, before: Tensor) -> Tensor:
    changed = there.clone()
    changed[-64:] = 0
    return changed


def one_bit(there: Tensor, before: Tensor) -> Tensor:
    changed = there.clone()
    changed.view(torch.uint8)[-1] ^= 1
    return changed


def all_nan(there: Tensor, before: Tensor) -> Tensor:
    return torch.full_like(there.view(torch.uint8), 0xFF).view(there.dtype)


def stale(there: Tensor, before: Tensor) -> Tensor:
    return before


def shifted(there: Tensor, before: Tensor) -> Tensor:
    return there.roll(1)


FAULTS = (zeros, tail_of_zeros, one_bit, all_nan, stale, shifted)


class Copier:
    """Replaces the copies of torch: "pinned" ones work without a GPU, and each one does some damage."""

    def __init__(self, there: Damage = nothing, back: Damage = nothing, only: str = "") -> None:
        self.there, self.back, self.only = there, back, only
        self._sent: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}

    def send(self, tensor: Tensor, device: torch.device, method: str) -> Tensor:
        return self._done(tensor, self.there, method, self._sent)

    def read(self, tensor: Tensor, method: str) -> Tensor:
        return self._done(tensor, self.back, method, self._read)

    def _done(self, tensor: Tensor, damage: Damage, method: str, before: dict[int, Tensor]) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        last = before.get(size, torch.zeros(size, dtype=torch.uint8)).view(tensor.dtype)
        before[size] = tensor.clone().view(torch.uint8)
        return damage(tensor, last) if method.startswith(self.only) else tensor.clone()


def results(copier: Copier) -> list[Result]:
    return [run_check(check, CPU)[0] for check in copy_checks(CPU, copier.send, copier.read)]


@pytest.mark.parametrize("damage", FAULTS)
@pytest.mark.parametrize("way", ["there", "back"])
def test_damage_is_noticed_and_the_way_is_named(way: str, damage: Damage) -> None:
    found = results(Copier(**{way: damage}))
    words = {"there": "copy to the device", "back": "copy to the host"}[way]
    assert all(result.status == "failed" and result.detail.startswith(words) for result in found), found
    assert all("bytes differ" in result.detail for result in found)
    assert {result.name.split(".")[1] for result in found} == set(METHODS)


def test_copies_that_work_pass() -> None:
    assert all(result.status == "passed" for result in results(Copier()))


@pytest.mark.parametrize("method", ["pageable", "pinned-async", "mapped"])
def test_one_bad_way_is_named_alone(method: str) -> None:
    failed = {
        result.name.split(".")[1] for result in results(Copier(there=tail_of_zeros, only=method)) if not result.ok
    }
    assert failed == {method}


def test_each_format_is_tried() -> None:
    seen = set()

    def watch(there: Tensor, before: Tensor) -> Tensor:
        seen.add((there.dtype, there.numel() * there.element_size()))
        return there

    results(Copier(there=watch))
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    assert seen == {(dtype, size) for dtype in dtypes for size in (4096, 2**20)}


def test_a_length_that_is_wrong_is_said() -> None:
    found = results(Copier(there=lambda there, before: there[:-1]))
    assert all(result.status == "failed" and "bytes arrived" in result.detail for result in found)


class Forgetful(TorchDispatchMode):
    """The memory of a living tensor is given to somebody else."""

    def __init__(self, harm: Callable[[Tensor], None], at: int) -> None:
        super().__init__()
        self.harm, self.at, self.made = harm, at, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "full":
            self.made.append(given)
            if len(self.made) == self.at:
                self.harm(self.made[self.at - 3])
        return given


def zero_all(tensor: Tensor) -> None:
    tensor.zero_()


def change_last(tensor: Tensor) -> None:
    tensor[-1] += 1


@pytest.mark.parametrize("harm", [zero_all, change_last])
@pytest.mark.parametrize("at", [5, 200, 400])
def test_memory_that_changes_under_a_living_tensor(harm: Callable[[Tensor], None], at: int) -> None:
    (check,) = memory_checks(CPU)
    with Forgetful(harm, at):
        result, _ = run_check(check, CPU)
    assert result.status == "failed" and says(result.detail, "checks/changed-while-it-lived")


def test_memory_that_keeps_what_it_holds() -> None:
    (check,) = memory_checks(CPU)
    with Forgetful(lambda tensor: None, 5):
        assert run_check(check, CPU)[0].status == "passed"
