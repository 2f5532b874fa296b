"""Other programs that take the card's memory while a run trains: the run gives way before the card is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device import allocator
from lora_rocm.device.allocator import NO_LIMIT, LimitFollower, limit_now, room_bytes
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.objectives.base import Prediction
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.memory import manager, oom_recovery
from lora_rocm.planning.step_choice import choose
from lora_rocm.planning.step_plan import Plan, Rates, StepRequirements
from lora_rocm.rundir.run_context import NOBODY
from lora_rocm.train import load_model, standalone
from tests.commands.test_plan import net, recipe
from tests.device.fake_card import GPU, KEPT_FREE, LIBRARIES, SETTINGS, TOTAL, FakeCard
from tests.train.test_loop import NoisyLine, Rig, same

STEPS = 8
WEIGHTS = 8 * GIB
A_SAMPLE = {False: GIB, True: 3 * GIB}
"""Bytes of a sample's activations: of small images, and of large ones."""
LARGE_FROM, GAME_AT = 5, 3  # iterations


class PageFaultError(RuntimeError):
    """The card is full, and memory that HIP did not count is overwritten or unmapped."""


@dataclass
class Device:
    """Gives a pass of the rig its memory: torch's allocator and the card, both simulated."""

    card: FakeCard
    game: int
    limits: list[int] = field(default_factory=list)
    iteration: int = 0

    def take(self, rows: int) -> None:
        if self.iteration == GAME_AT:
            self.card.changed(others=GIB + self.game)
        wanted = WEIGHTS + rows * A_SAMPLE[self.iteration >= LARGE_FROM]
        self.limits.append(self.card.limit)
        if wanted > self.card.limit:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
        if wanted + self.card.libraries + self.card.others > TOTAL:
            raise PageFaultError("HIP error: an illegal memory access was encountered")
        self.card.changed(reserved=max(self.card.reserved, wanted), tensors=WEIGHTS)


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, game: int, follows: bool = True, every_s: float = 0.0
) -> tuple[Rig, Device]:
    card = FakeCard(tmp_path, others=GIB, libraries=LIBRARIES, reserved=WEIGHTS).install(monkeypatch)
    device = Device(card, game)
    monkeypatch.setattr(allocator, "ASK_EVERY_S", every_s)
    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: card.changed(reserved=WEIGHTS))
    rig = Rig()
    rig.trainer.limit = LimitFollower(GPU, SETTINGS, rig.trainer.context.notice)
    rig.trainer.limit.renew()
    if not follows:
        rig.trainer.limit = NO_LIMIT

    class Sized(NoisyLine):
        def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
            device.iteration = rig.trainer.position.iteration + (rig.trainer.position.updates > 0)
            device.take(len(batch["x"]))
            return super().predict(model, batch, draws)

    rig.trainer.family = rig.trainer.engine.family = Sized()  # type: ignore[assignment]
    return rig, device


def steps_of(rig: Rig) -> list[dict[str, Any]]:
    return [{key: event[key] for key in ("updates", "iteration", "learning_rate")} for event in rig.of_type("step")]


def test_a_game_that_starts_shrinks_the_limit_and_the_step_is_made_again_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = Rig().fit(STEPS)
    rig, device = run(tmp_path, monkeypatch, game=4 * GIB)
    rig.fit(STEPS)
    before, after = (TOTAL - others - KEPT_FREE - LIBRARIES for others in (GIB, 5 * GIB))
    assert device.limits[0] == before and device.limits[-1] == after and set(device.limits) == {before, after}
    assert rig.finished and [event["id"] for event in rig.of_type("change")] == ["micro-batch-halved"]
    assert [event["kind"] for event in rig.of_type("incident")] == ["out-of-memory"]
    assert steps_of(rig) == steps_of(undisturbed)
    for name, weight in undisturbed.weights().items():
        torch.testing.assert_close(rig.weights()[name], weight, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(rig.of_type("step"), undisturbed.of_type("step"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize(("follows", "every_s"), [(False, 0.0), (True, 1e9)], ids=["never asked", "asked once"])
def test_a_limit_that_stays_ends_in_a_page_fault(
    follows: bool, every_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same game, and nobody asks again."""
    rig, device = run(tmp_path, monkeypatch, game=4 * GIB, follows=follows, every_s=every_s)
    with pytest.raises(PageFaultError):
        rig.fit(STEPS)
    assert len(set(device.limits)) == 1 and rig.of_type("change") == []


@pytest.mark.parametrize("game", [0, GIB // 2])
def test_without_a_lack_of_memory_the_bytes_are_those_of_any_run(
    game: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, device = run(tmp_path, monkeypatch, game=game)
    assert same(rig.fit(STEPS), Rig().fit(STEPS))
    assert rig.of_type("change") == [] and len(set(device.limits)) == (2 if game else 1)
    assert [event["loss"] for event in rig.of_type("step")] == [
        event["loss"] for event in Rig().fit(STEPS).of_type("step")
    ]


def test_recovery_asks_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two times that it would be asked: memory has just run out."""
    rig, device = run(tmp_path, monkeypatch, game=0, every_s=1e9)
    take, full = device.take, [True]

    def takes(rows: int) -> None:
        if device.iteration == GAME_AT and full:
            full.clear()
            device.card.changed(others=7 * GIB)
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
        take(rows)

    monkeypatch.setattr(device, "take", takes)
    rig.fit(STEPS)
    assert device.limits[-1] == TOTAL - 7 * GIB - KEPT_FREE - LIBRARIES
    assert [event["kind"] for event in rig.of_type("incident")] == ["out-of-memory"] and rig.finished


def test_hooks_begin_with_a_limit_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint, previews: actions that take memory outside steps."""
    rig, device = run(tmp_path, monkeypatch, game=0, every_s=1e9)
    seen: list[int] = []

    class Previews:
        def due(self, updates: int) -> bool:
            if updates == 2:
                device.card.changed(others=3 * GIB)
            return updates == 2

        def act(self, trainer: Any) -> None:
            seen.append(device.card.limit)

    rig.trainer.hooks = [Previews()]
    rig.fit(3)
    assert seen == [TOTAL - 3 * GIB - KEPT_FREE - LIBRARIES]


def test_a_model_that_moves_begins_with_a_limit_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base of a run, and the base of a process that does not train: both were read for minutes before."""
    card = FakeCard(tmp_path).install(monkeypatch)
    monkeypatch.setattr(standalone, "DeviceTransfer", lambda *args, **how: None)
    monkeypatch.setattr(load_model, "decide", lambda *how, **named: SimpleNamespace(budget=card.limit))
    moves: list[Callable[[], object]] = [
        lambda: standalone.open_transfer(GPU, SETTINGS),
        lambda: load_model.choose_memory(start, None, [SampleShape.of(tokens=8)]),  # type: ignore[arg-type]
    ]
    start: Any = SimpleNamespace(device=GPU, settings=SETTINGS, recipe=None, dtype=None, context=NOBODY, counting=None)
    for number, move in enumerate(moves, 1):
        card.changed(others=number * GIB)
        move()
        assert card.limit == TOTAL - number * GIB - KEPT_FREE - LIBRARIES


def test_the_plan_of_a_step_follows_what_others_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(tmp_path, libraries=LIBRARIES).install(monkeypatch)
    job, ways = StepRequirements(batch_size=2), []
    for others in (0, 8 * GIB, 14 * GIB):
        card.changed(others=others)
        chosen = choose(room_bytes(GPU, SETTINGS), net(), job, Rates())
        assert chosen is not None and chosen.needed_bytes <= TOTAL - others - KEPT_FREE - LIBRARIES
        ways.append((chosen.mode, chosen.rows))
    assert ways == [("keep", 2), ("keep", 1), ("selective", 1)]


def test_the_first_pass_asks_for_its_budget_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan is chosen if others took memory since the first one was."""
    card = FakeCard(tmp_path, libraries=LIBRARIES).install(monkeypatch)
    budget = room_bytes(GPU, SETTINGS)
    memory = manager.choose_from(recipe(), net(), StepRequirements(batch_size=2), budget, Rig().trainer.context)
    assert memory.plan is not None and memory.plan.mode == "keep"
    memory.room = lambda: room_bytes(GPU, SETTINGS)
    monkeypatch.setattr(memory, "_peak", lambda *how: memory.plan.peak_bytes)  # type: ignore[union-attr]
    changed: list[Plan] = []

    def apply(*how: Any, again: bool) -> None:
        assert again and memory.plan is not None
        changed.append(memory.plan)

    monkeypatch.setattr(memory, "apply", apply)
    nothing: Any = None
    memory.probe(nothing, nothing, nothing, nothing)
    assert changed == []  # the control
    card.changed(others=9 * GIB)
    memory.probe(nothing, nothing, nothing, nothing)
    assert changed and changed[-1].rows == 1 and memory.budget_bytes == limit_now(GPU, SETTINGS)
