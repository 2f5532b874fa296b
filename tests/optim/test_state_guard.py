"""Trained weights are guarded: one flipped bit between two updates moves nothing, and is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.reliable_state import STATE_KINDS, clean_updates, faulty_updates
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.checks.canary import Canary
from lora_rocm.checks.graph_check import capture_on_gpu
from lora_rocm.device.placement.base import Resident
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import CanaryError, MachineError, StateError
from lora_rocm.memory import oom_recovery
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.optim.state_guard import StateGuard
from lora_rocm.recipe.optim_sections import AdamwSection
from lora_rocm.rules.mitigations import seen_of_code
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import Event, StepEvent
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train.guard import Guard
from tests.checks.test_frozen_weights import Recorder
from tests.memory.test_oom_recovery import FullAt
from tests.optim.test_base import BLOCKED, FREE, everything, set_gradients
from tests.train.test_loop import CPU, Corruptor, Rig, same
from tests.train.test_together import Ranks
from tests.wording import worded

GPU = torch.device("cuda", 0)
DEVICES = [CPU, pytest.param(GPU, marks=pytest.mark.gpu, id="gpu")]
BITS = {"top of the mantissa": 1 << 22, "lowest of the mantissa": 1, "sign": -(2**31)}
AT = 5

Part = Callable[[GatedOptimizer], Tensor]


def moment(name: str) -> Part:
    return lambda optimizer: next(t for key, t in optimizer.state().items() if key.endswith(f".{name}"))


PARTS: dict[str, Part] = {
    "weights": lambda optimizer: optimizer.weights.masters,
    "exp_avg": moment("exp_avg"),
    "exp_avg_sq": moment("exp_avg_sq"),
    "average of the weights (EMA)": lambda optimizer: next(iter(optimizer.ema.values())),
    "step counts and loss scale": lambda optimizer: optimizer.state()["group0.step"],
}


def flip(tensor: Tensor, bit: int) -> None:
    """One bit of the third number, or of the only one."""
    flat = tensor.detach().view(-1)
    flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)[min(2, flat.numel() - 1)] ^= bit


def spoilt_after(rig: Rig, updates: int, act: Callable[[], object]) -> Rig:
    """Do something when so many updates are confirmed; the passes of the next one are queued already."""
    emit = rig.trainer.context.emit

    def told(event: Event) -> None:
        emit(event)
        if isinstance(event, StepEvent) and event.updates == updates:
            act()

    rig.trainer.context = replace(rig.trainer.context, emit=told)
    return rig


@pytest.mark.parametrize("bit", BITS)
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_is_named_before_the_next_update_and_nothing_moves(part: str, bit: str) -> None:
    rig = Rig()
    held: list[dict[str, Tensor]] = []

    def spoil() -> None:
        flip(PARTS[part](rig.optimizer), BITS[bit])
        held.append(everything(rig.optimizer))

    with pytest.raises(StateError) as caught:
        spoilt_after(rig, AT, spoil).fit(AT + 9)
    assert (
        caught.value.where == worded("optim/after-at-updates-part", at=AT, part=part)
        and seen_of_code(caught.value.code) == "corruption"
    )
    assert rig.trainer.position == Position(AT, AT) and not rig.of_type("incident")
    assert all(torch.equal(tensor, held[0][name]) for name, tensor in everything(rig.optimizer).items())


def test_without_the_guard_the_same_bit_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateGuard, "check", lambda guard: guard.changed)
    rig = Rig()
    spoilt_after(rig, AT, lambda: flip(PARTS["exp_avg"](rig.optimizer), BITS["top of the mantissa"]))
    assert rig.fit(AT + 9).finished and not same(rig, Rig().fit(AT + 9))


def full(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: None)
    rig, mode = Rig(), FullAt(40)
    work_of = rig.trainer._work

    def work(waiting: Any) -> Any:
        with mode:
            mode.counting = True
            found = work_of(waiting)
            mode.counting = False
        return found

    rig.trainer._work = work  # type: ignore[method-assign]
    return rig


@pytest.mark.parametrize(
    ("make", "incident"),
    [
        (lambda patch: Rig(), ""),
        (lambda patch: Rig(accumulation=4), ""),
        (lambda patch: Rig(poison=7), "nonfinite"),
        (lambda patch: Rig(poison=7, scale=True), "nonfinite"),
        (lambda patch: Rig(poison=7, value=3e18, scale=True), "fp16-overflow"),
        (lambda patch: Rig(copy=Corruptor({9, 30}, ("unpinned",))), "transfer"),
        (full, "out-of-memory"),
    ],
    ids=["plain", "accumulation", "skipped", "skipped, scaled", "overflow", "sent again", "memory"],
)
def test_a_long_run_without_a_fault_gives_no_alarm(
    make: Callable[[pytest.MonkeyPatch], Rig], incident: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(monkeypatch).fit(60)
    assert rig.finished and {event["kind"] for event in rig.of_type("incident")} == {incident} - {""}
    assert float(rig.optimizer.state_guard.check()) == 0 and rig.optimizer.state_guard.failure(60) is None


def test_state_that_was_loaded_is_right_and_forgets_the_verdict() -> None:
    rig, other = Rig().fit(4), Rig().fit(7)
    flip(rig.optimizer.weights.masters, 1)
    assert float(rig.optimizer.state_guard.check()) == 1
    with torch.no_grad():
        for name, weight in other.weights().items():
            rig.parameters[name].copy_(weight)
    rig.optimizer.load(other.optimizer.state(), other.optimizer.ema)
    rig.trainer.position = replace(other.trainer.position)
    assert same(rig.fit(12), other.fit(12))


def test_a_rank_whose_state_changed_holds_all_back() -> None:
    ranks, clean = Ranks(2), Ranks(2)
    clean.fit(3)
    spoilt_after(ranks.rigs[1], 3, lambda: flip(PARTS["exp_avg_sq"](ranks.rigs[1].optimizer), 1))
    other, guilty = ranks.fit()
    assert isinstance(guilty, StateError) and "exp_avg_sq" in guilty.where
    assert isinstance(other, MachineError) and other.code == "rank-lost"
    assert same(ranks.rigs[0], clean.rigs[0]) and ranks.rigs[0].trainer.position.updates == 3


def make(device: torch.device = CPU, leaf: torch.dtype = torch.float32, scale: bool = True) -> GatedOptimizer:
    generator = torch.Generator().manual_seed(3)
    layers = {name: nn.Parameter(torch.randn(70, 90, generator=generator).to(device)) for name in "ab"}
    groups: list[dict[str, Any]] = [{"names": [name], "lr": 1e-2} for name in layers]
    how = {"max_train_steps": 10, "ema_decay": 0.9, "use_loss_scale": scale, "triton": True}
    return GatedOptimizer(FlatWeights(layers, leaf), groups, AdamwSection(), **how)


def one_update(optimizer: GatedOptimizer, verdict: Tensor = FREE, value: float | None = None) -> None:
    for seed, leaf in enumerate(optimizer.weights.leaves.values()):
        leaf.grad = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(seed)).to(leaf.device, leaf.dtype)
        if value is not None:
            leaf.grad[0, 0] = value
    optimizer.weights.gather()
    optimizer.step(0, verdict.to(optimizer.weights.masters.device))


def is_changed(optimizer: GatedOptimizer) -> list[str]:
    """The weights that the guard names; none where its verdict is 0."""
    verdict = float(optimizer.state_guard.check())
    failure = optimizer.state_guard.failure(0)
    assert verdict == (failure is not None)
    return failure.where.partition(": ")[2].split(", ") if failure else []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("leaf", [torch.float32, torch.bfloat16, torch.float16])
def test_every_part_on_the_device_and_the_layers_own_copy(device: torch.device, leaf: torch.dtype) -> None:
    optimizer = make(device, leaf)
    parts = {**PARTS, "weights in the layers": lambda optimizer: optimizer.weights.leaves["b"]}
    if leaf is torch.float32:
        del parts["weights in the layers"]  # it is the weights
    for part, of in parts.items():
        one_update(optimizer)
        assert is_changed(optimizer) == []
        flip(of(optimizer), 1)
        assert is_changed(optimizer) == [part]
        flip(of(optimizer), 1)
        assert is_changed(optimizer) == [part], "the verdict stays until other state is loaded"
        optimizer.state_guard.reset()


@pytest.mark.parametrize(("verdict", "value"), [(BLOCKED, None), (FREE, float("inf"))], ids=["blocked", "overflow"])
def test_what_changes_while_an_update_is_left_out_is_seen_after_it(verdict: Tensor, value: float | None) -> None:
    optimizer = make()
    one_update(optimizer)
    for part in ("weights", "exp_avg"):
        one_update(optimizer, verdict, value)
        assert is_changed(optimizer) == []
        flip(PARTS[part](optimizer), 1)  # as if between its comparison and its end
        one_update(optimizer, verdict, value)
        assert is_changed(optimizer) == [part]
        optimizer.state_guard.reset()


def test_an_update_by_itself_does_what_it_is_told() -> None:
    """A caller of an update asks the guard first, as the loop does: all ranks have to decide the same."""
    optimizer = make(scale=False)
    set_gradients(optimizer, 0)
    flip(optimizer.weights.masters, 1)
    before = everything(optimizer)
    optimizer.step(0, FREE)
    assert not torch.equal(before["live.a"], everything(optimizer)["live.a"])


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_the_guard_waits_for_no_gpu(captured: bool) -> None:
    guard = make(GPU, torch.bfloat16).state_guard
    guard.use_graphs(capture_on_gpu if captured else None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        guard.check()
        guard.renew()
        with pytest.raises(RuntimeError, match="synchroniz"):
            guard.failure(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_say_what_launches_say(device: torch.device) -> None:
    plain, captured, recorder = make(device), make(device), Recorder()
    captured.state_guard.use_graphs(capture_on_gpu if device is GPU else recorder)
    for number in range(6):
        value = float("inf") if number == 3 else None
        for optimizer in (plain, captured):
            one_update(optimizer, value=value)
            assert is_changed(optimizer) == []
        assert plain.state_guard.digest() == captured.state_guard.digest()
    assert device is GPU or (recorder.captured == 2 and recorder.replays > 12)
    flip(captured.weights.masters, 1)
    assert is_changed(captured) == ["weights"]


@pytest.mark.parametrize("lost", ["check", "renew"])
def test_a_replay_that_does_not_happen_gives_no_good_verdict(lost: str) -> None:
    optimizer, recorder = make(), Recorder()
    optimizer.state_guard.use_graphs(recorder)
    one_update(optimizer)
    assert is_changed(optimizer) == [], "the control"
    recorder.runs = lost == "check"
    one_update(optimizer)
    recorder.runs = lost == "renew"
    named = is_changed(optimizer)
    assert (
        named == [worded("optim/the-comparison-did-not-run")]
        if lost == "check"
        else {"weights", "exp_avg"} < set(named)
    )


def nothing_replayed(work: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def no_capture(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("capture", [nothing_replayed, no_capture])
def test_graphs_that_compute_wrong_are_refused_as_those_of_the_canary(capture: Any) -> None:
    optimizer = make()
    one_update(optimizer)
    canary = Canary(CPU, torch.float32, 2, Resident(DeviceTransfer(CPU, pin=False)))
    guard = Guard(canary, optimizer, NOBODY)
    with pytest.raises(CanaryError) as caught:
        guard.use_graphs(capture)
    assert caught.value.code == "canary-graph" and seen_of_code(caught.value.code) == "graph"
    optimizer.state_guard.reset()
    one_update(optimizer)
    assert is_changed(optimizer) == [], "launch by launch as before"


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_no_fault_in_what_is_carried_on_is_trained_on(captured: bool) -> None:
    device = GPU if captured else CPU
    found, clean = faulty_updates(110, device, 1, captured), clean_updates(100, device, 1, captured)
    assert not found.trained and not found.false_alarms and not clean.false_alarms
    assert set(found.caught) == set(STATE_KINDS) and found.caught.total() > 90


def test_without_the_guard_each_kind_of_fault_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateGuard, "check", lambda guard: guard.changed)
    found = faulty_updates(55, CPU, 1)
    assert not found.caught and set(found.trained) == set(STATE_KINDS)
