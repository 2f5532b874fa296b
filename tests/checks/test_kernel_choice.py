"""A run's kernels: decided once, plain where nothing is proven in time, and the same in every resume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_rocm.checks import kernel_choice
from lora_rocm.checks.kernel_check import FINGERPRINTS, SMALL, Case, ExactCase, first_wrong
from lora_rocm.checks.kernel_choice import FACT, LIMIT_S, KernelChoice, choose
from lora_rocm.hardware.software_stack import STACK
from lora_rocm.kernels import backend
from lora_rocm.kernels.gated import activated, gated
from lora_rocm.kernels.norms import Branch, add_branch, add_layer_norm, group_norm, residual
from lora_rocm.kernels.quantised import quantised
from lora_rocm.kernels.rotary import Rotation, norm_rotary
from lora_rocm.kernels.token_loss import to_loss_gradient
from lora_rocm.rundir.event_types import Event, KernelsEvent
from tests.event_lines import hearing
from tests.wording import says

pytest.importorskip("triton")
GPU, BF16 = torch.device("cuda"), torch.bfloat16
GEGLU, SILU, RESIDUAL = "gated.gated: gelu", "gated.gated: silu", "norms.residual: bias"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[None]:
    monkeypatch.setenv("LORA_ROCM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv(STACK, "driver 1, GPU 1")
    yield
    backend.use_plain(())


class Compared:
    """In place of the comparison: each takes ten seconds of its clock, and kernels of ``wrong`` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names, self.wrong, self.now = list[str](), set[str](), 0.0
        self.said, self.events = list[str](), list[Event]()
        monkeypatch.setattr(kernel_choice, "first_wrong", self)

    def __call__(self, device: torch.device, dtype: torch.dtype, cases: Iterable[Case | ExactCase]) -> str | None:
        self.now += 10
        self.names += [case.kernels[0] for case in cases]
        return "it has wrong numbers" if self.wrong & {*self.names[-1:]} else None

    def choose(self, *kernels: str, **how: Any) -> KernelChoice:
        self.names, self.said, self.events = [], [], []
        context = hearing(self.said, self.events)
        return choose(GPU, BF16, kernels or None, context=context, clock=lambda: self.now, **how)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(monkeypatch)


def test_what_is_not_proven_in_time_is_plain_in_this_run_and_not_in_the_next(compared: Compared) -> None:
    first = compared.choose(GEGLU, RESIDUAL, SILU, limit_s=15)
    assert compared.names == [FINGERPRINTS.kernels[0], GEGLU], "the guard of each step is compared first"
    assert first == KernelChoice(True, (SILU, RESIDUAL))
    assert len(compared.said) == 2 and says(compared.said[1], "checks/not-proven-in-time")
    last = compared.events[-1]
    assert isinstance(last, KernelsEvent) and (last.done, last.total) == (2, 4) and last.plain == [SILU, RESIDUAL]
    assert backend.decided("triton", lambda: SILU) == "eager" and backend.decided("triton", lambda: GEGLU) == "triton"
    assert compared.choose(GEGLU, RESIDUAL, SILU, limit_s=25) == KernelChoice(True), "what was proven is known"
    assert compared.names == [RESIDUAL, SILU] and backend.decided("triton", lambda: SILU) == "triton"
    assert compared.choose(GEGLU, RESIDUAL, SILU, limit_s=0) == KernelChoice(True) and not compared.names
    assert len(compared.said) == 0


def test_the_kernels_that_guard_the_state_are_always_compared(compared: Compared) -> None:
    assert compared.choose(GEGLU, limit_s=-1) == KernelChoice(True, (GEGLU,)) and compared.names == [
        FINGERPRINTS.kernels[0]
    ]


def test_a_start_without_a_limit_waits_for_all(compared: Compared) -> None:
    assert compared.choose(GEGLU, RESIDUAL, limit_s=None) == KernelChoice(True) and len(compared.names) == 3
    assert LIMIT_S > 60, "a usual compiler is never late"


def test_a_resume_keeps_the_decision_on_both_sides_of_a_proof(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = KernelChoice(True, (RESIDUAL,))
    compared.choose(GEGLU, RESIDUAL, limit_s=None)
    assert compared.choose(GEGLU, RESIDUAL, kept=plain) == plain, "proven since, and plain nevertheless"
    assert backend.decided("triton", lambda: RESIDUAL) == "eager" and not compared.names
    monkeypatch.setenv(STACK, "driver 2, GPU 1")
    assert compared.choose(GEGLU, RESIDUAL, kept=KernelChoice(True), limit_s=0) == KernelChoice(True)
    assert set(compared.names) == {FINGERPRINTS.kernels[0], GEGLU, RESIDUAL}, "it waits, despite the limit"
    monkeypatch.setenv(STACK, "driver 3, GPU 1")
    assert compared.choose(GEGLU, RESIDUAL, kept=plain) == plain
    assert RESIDUAL not in compared.names, "what stays plain is not compiled"
    assert compared.choose(GEGLU, kept=KernelChoice(False)) == KernelChoice(False) and not compared.names
    assert says(compared.said[0], "checks/began-without-triton-kernels")


@pytest.mark.parametrize("kept", [None, KernelChoice(True)])
def test_a_wrong_kernel_ends_the_use_of_all(compared: Compared, kept: KernelChoice | None) -> None:
    compared.wrong = {RESIDUAL}
    assert compared.choose(GEGLU, RESIDUAL, kept=kept) == KernelChoice(False)
    assert "it has wrong numbers" in compared.said[-1]
    compared.wrong = set()
    assert compared.choose(GEGLU, RESIDUAL, kept=kept) == KernelChoice(True), "the control"


def test_checking_counts(compared: Compared) -> None:
    compared.choose(GEGLU, RESIDUAL)
    events = [event for event in compared.events if isinstance(event, KernelsEvent)]
    assert [(event.done, event.total, bool(event.kernel)) for event in events] == [
        (0, 3, True),
        (1, 3, True),
        (2, 3, True),
        (3, 3, False),
    ]
    compared.choose(GEGLU, RESIDUAL)
    assert [(event.done, event.total) for event in compared.events if isinstance(event, KernelsEvent)] == [(0, 0)]


def test_a_checkpoint_stores_the_decision(compared: Compared) -> None:
    for choice in (KernelChoice(True), KernelChoice(False), KernelChoice(True, (GEGLU, RESIDUAL))):
        assert KernelChoice.stored_in(json.loads(json.dumps({FACT: choice.to_fact()}))) == choice
    assert KernelChoice.stored_in(None) is KernelChoice.stored_in({"threads": 2}) is None, "of an earlier version"
    assert KernelChoice.stored_in({FACT: None}) is None, "of a run on the CPU"


CALLS: dict[str, Callable[[], object]] = {
    GEGLU: lambda: gated("gelu", "triton", torch.ones(2, 8)),
    "gated.activated: gelu": lambda: activated("gelu", "triton", torch.ones(2, 8, dtype=BF16)),
    RESIDUAL: lambda: residual(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), torch.ones(2), "triton"),
    "norms.group_norm: one input, SiLU": lambda: group_norm(torch.ones(1, 4, 3, 3), nn.GroupNorm(2, 4), "triton"),
    "norms.add_norm: nothing added, LayerNorm": lambda: add_layer_norm(
        torch.ones(2, 8), None, nn.LayerNorm(8), "triton"
    ),
    "norms.add_branch: gated sum, no norm": lambda: add_branch(
        torch.ones(2, 8), Branch(torch.ones(2, 8), torch.ones(8)), "triton"
    ),
    "rotary.norm_rotary: halves, no norm": lambda: norm_rotary(
        [(torch.ones(1, 3, 2, 8), None)], 0.0, Rotation(torch.ones(3, 4), torch.zeros(3, 4), False), "triton"
    ),
    "token_loss.to_loss_gradient: no cap": lambda: to_loss_gradient(
        torch.ones(2, 8), torch.ones(2).long(), -100, "triton"
    ),
    "quantised.unpack: int8": lambda: packed("int8"),
    "quantised.unpack: nf4": lambda: packed("nf4"),
}


def packed(name: str) -> torch.Tensor:
    layer = quantised(name, "").packed(nn.Linear(64, 64, bias=False, dtype=BF16))
    layer.implementation = "triton"
    output: torch.Tensor = layer(torch.ones(1, 64, dtype=BF16))
    return output


@pytest.mark.parametrize("kernel", CALLS)
def test_each_kernel_can_be_plain_alone(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain kernel computes on a CPU, where a Triton kernel cannot be launched."""
    others = [name for name in CALLS if name != kernel]
    backend.use_plain([kernel])
    CALLS[kernel]()
    backend.use_plain(others)
    with pytest.raises(Exception, match="."):
        CALLS[kernel]()


@pytest.mark.parametrize("number", range(len(SMALL)), ids=lambda number: SMALL[number].name)
def test_a_comparison_launches_kernels_that_the_run_computes_plainly(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else plain PyTorch would be compared with itself, and a kernel that was never launched would count as proven."""
    launched = list[str]()

    def launches(implementation: str, x: torch.Tensor, kernel: Callable[[], str]) -> bool:
        if implementation == "triton":
            launched.append(kernel())
        return False

    monkeypatch.setattr(backend, "launches", launches)
    case = SMALL[number]
    backend.use_plain([case.kernel])
    first_wrong(torch.device("cpu"), torch.float32, [case])
    assert launched or case.kernel.startswith(("gated.activated", "quantised"))
    assert backend.decided("triton", lambda: case.kernel) == "eager", "afterwards it is as before"


def test_all_kernels_of_the_cases_are_covered() -> None:
    functions = {name.partition(":")[0] for name in CALLS}
    assert functions == {case.kernel.partition(":")[0] for case in SMALL}
    assert not functions & {name.partition(":")[0] for name in itertools.chain([FINGERPRINTS.kernels[0]])}
