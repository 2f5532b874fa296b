"""Graphs are believed only where they say what the eager pass says. Here a capture is a function that runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lora_rocm.train.graphs import MAX_GRAPHS, Graphs, Passed
from tests.train.test_loop import Rig, same

Replay = tuple[Callable[[], None], Passed]


class Fake:
    """Stands in for the GPU: what is captured is computed again at each replay, into the same results."""

    def __init__(
        self, spoil: Callable[[Passed], None] = lambda passed: None, before: Callable[[], None] = lambda: None
    ):
        self.spoil, self.before, self.replays = spoil, before, 0

    def __call__(self, run: Callable[[], Passed]) -> Replay:
        gradients = self.graphs.weights.gradients
        kept = gradients.clone()
        passed = Passed(*(tensor.clone() for tensor in run()))
        gradients.copy_(kept)  # a real capture computes nothing

        def replay() -> None:
            self.before()
            for static, found in zip(passed, run(), strict=True):
                static.copy_(found)
            self.spoil(passed)
            self.replays += 1

        return replay, passed

    def into(self, rig: Rig, exact: bool = True) -> list[str]:
        said: list[str] = []
        self.graphs = Graphs(rig.optimizer.weights, exact, said.append, new_capture=lambda: self)
        rig.trainer.engine.graphs = self.graphs
        return said


@pytest.mark.parametrize("how", [{}, {"accumulation": 2}, {"scale": True}, {"parts": 2}])
def test_replayed_steps_are_the_eager_ones(how: dict[str, Any]) -> None:
    rig, fake = Rig(**how), Fake()
    assert fake.into(rig) == [] and same(rig.fit(6), Rig(**how).fit(6))
    passes = 6 * max(how.get("accumulation", 1), how.get("parts", 1))
    assert fake.replays == passes - 1  # all but the first: the second is made both ways


def corrupt(passed: Passed) -> None:
    passed.loss_B.zero_()


def test_a_graph_that_says_something_else_is_never_used() -> None:
    rig, fake = Rig(), Fake(corrupt)
    said = fake.into(rig, exact=False)
    assert same(rig.fit(6), Rig().fit(6)) and fake.replays == 1
    assert len(said) == 1 and "other gradients" in said[0]


def test_a_graph_with_stale_inputs_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was captured with the inputs of another batch: a graph that has baked them in gives their gradients."""
    rig, fake = Rig(), Fake()
    said = fake.into(rig, exact=False)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    capture = Graphs._captured

    def watching(self: Graphs, eager: Any, example: Any) -> Any:
        graph = capture(self, eager, example)
        inputs.append((graph.batch["x"], graph.batch["x"].clone()))
        return graph

    fake.before = lambda: inputs[0][0].copy_(inputs[0][1])  # type: ignore[assignment,return-value]
    monkeypatch.setattr(Graphs, "_captured", watching)
    assert same(rig.fit(6), Rig().fit(6))
    assert fake.replays == 1 and len(said) == 1


def test_without_the_comparison_a_wrong_graph_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the two tests above."""
    monkeypatch.setattr(Graphs, "_agree", lambda self, *pairs: True)
    rig, fake = Rig(), Fake(before=lambda: fake.graphs.weights.gradients.add_(1.0))
    fake.into(rig)
    assert not same(rig.fit(6), Rig().fit(6)) and fake.replays == 5


def test_what_cannot_be_captured_stays_eager_and_is_said_once() -> None:
    rig, fake = Rig(), Fake()

    def refuses(run: Callable[[], Passed]) -> Replay:
        run()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand so on")

    said = fake.into(rig)
    fake.graphs.new_capture = lambda: refuses
    rig.fit(6)
    assert len(said) == 1 and "not permitted" in said[0] and "and so on" not in said[0]
    assert fake.replays == 0 and same(rig, Rig().fit(6))


def test_a_fault_of_the_device_is_no_reason_to_go_on() -> None:
    def faults(run: Callable[[], Passed]) -> Replay:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rig, fake = Rig(), Fake()
    said = fake.into(rig)
    fake.graphs.new_capture = lambda: faults
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rig.fit(6)
    assert said == []


def test_overflow_in_the_second_pass_is_no_reason_to_give_graphs_up() -> None:
    rig, fake = Rig(scale=True), Fake()
    said = fake.into(rig)
    scale = rig.optimizer.loss_scale
    scale.fill_(3e38)
    rig.fit(40)
    assert said == [] and fake.replays > 0 and rig.of_type("incident")


def test_released_graphs_come_again() -> None:
    rig, fake = Rig(), Fake()
    fake.into(rig)
    rig.fit(4)
    rig.trainer.engine.release()
    assert fake.graphs.captured == {}
    rig.fit(8)
    assert len(fake.graphs.captured) == 1 and fake.replays == 3 + 3


def test_shapes_without_end_stay_eager() -> None:
    fake, rig = Fake(), Rig()
    fake.into(rig)
    fake.graphs.captured = {((str(n), torch.Size(), torch.float32),): None for n in range(MAX_GRAPHS)}
    assert same(rig.fit(4), Rig().fit(4)) and fake.replays == 0
