"""Graphs are trusted only where their result equals the eager pass. Here a capture is a function that runs again."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.train import graphs as graphs_module
from lora_rocm.train.graphs import MAX_GRAPHS, Graphs, Passed
from tests.supervisor.fake_run import listening
from tests.train.test_loop import Rig, same
from tests.wording import says

Replay = tuple[Callable[[], None], Passed]


class Fake:
    """Replaces the GPU: the captured code is computed again at each replay, into the same results."""

    def __init__(
        self, spoil: Callable[[Passed], None] = lambda passed: None, before: Callable[[], None] = lambda: None
    ):
        self.spoil, self.before, self.replays = spoil, before, 0

    def __call__(self, run: Callable[[], Passed]) -> Replay:
        gradients = self.graphs.weights.gradients
        kept = gradients.clone()
        passed = run().copy()
        gradients.copy_(kept)  # a real capture computes nothing

        def replay() -> None:
            self.before()
            for static, found in zip(passed[:2], run()[:2], strict=True):
                static.copy_(found)
            self.spoil(passed)
            self.replays += 1

        return replay, passed

    def into(self, rig: Rig, exact: bool = True) -> list[str]:
        said: list[str] = []
        self.graphs = Graphs(rig.optimizer.weights, exact, listening(said), new_capture=lambda: self)
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
    assert len(said) == 1 and "different gradients" in said[0]


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
    rig.optimizer.state_guard.reset()
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


def test_shapes_without_a_place_stay_eager_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 0)
    fake, rig = Fake(), Rig()
    said = fake.into(rig)
    assert same(rig.fit(4), Rig().fit(4)) and fake.replays == 0
    assert len(said) == 1 and says(said[0], "train/steps-of-0-sizes-are-captured")


class Layer:
    """``x A^T B^T``, alone; ``spoil`` changes what a replay adds to the gradients."""

    def __init__(
        self, spoil: Callable[[dict[str, torch.Tensor]], None], b: float = 1.0, device: str | torch.device = "cpu"
    ) -> None:
        sizes, self.device = {"lora_A": (2, 3), "lora_B": (1, 2)}, device
        self.leaves = {name: torch.nn.Parameter(torch.ones(size, device=device)) for name, size in sizes.items()}
        self.weights, self.spoil, self.said = FlatWeights(self.leaves), spoil, []
        self.replays = self.captures = 0
        self.weights.parameters["lora_B"].fill_(b)
        self.graphs = Graphs(self.weights, exact=False, context=listening(self.said), new_capture=lambda: self.capture)

    said: list[str]

    def eager(self, batch: dict[str, torch.Tensor], draws: dict[str, torch.Tensor]) -> Passed:
        loss_B = (batch["x"] @ self.leaves["lora_A"].t() @ self.leaves["lora_B"].t())[:, 0]
        loss = (loss_B * batch["weight"]).sum()
        loss.backward()
        self.weights.gather()
        return Passed(loss.detach(), loss_B.detach())

    def capture(self, run: Callable[[], Passed]) -> Replay:
        self.captures += 1
        kept, place = self.weights.gradients.clone(), self.weights.gradients.data_ptr()
        passed = run()
        self.weights.gradients.copy_(kept)

        def replay() -> None:
            assert self.weights._gradients is not None and self.weights.gradients.data_ptr() == place  # it writes there
            before = self.weights.gradients.clone()
            self.weights.gradients.zero_()
            for static, found in zip(passed[:2], run()[:2], strict=True):
                static.copy_(found)
            self.spoil(self.weights.views(self.weights.gradients))
            self.weights.gradients.add_(before)
            self.replays += 1

        return replay, passed

    def passes(self, *weights: float) -> list[dict[str, torch.Tensor]]:
        """Gradients of passes over samples with these weights."""
        found = []
        for number, weight in enumerate(weights):
            self.weights.drop_gradients()
            x_BD = torch.full((2, 3), number + 1.0)
            self.graphs.run(self.eager, {"x": x_BD, "weight": torch.full((2,), weight)}, {})
            found.append({name: view.clone() for name, view in self.weights.views(self.weights.gradients).items()})
        return found

    def passes_of(self, rows: Iterable[int], captures: bool = True) -> list[torch.Tensor]:
        """Gradients of passes with the given numbers of rows; ``captures``: not all eager."""
        found = []
        for number, count in enumerate(rows):
            self.weights.drop_gradients()
            batch = {"x": torch.full((count, 3), number + 1.0), "weight": torch.ones(count)}
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            self.graphs.run(self.eager, batch, {}) if captures else self.eager(batch, {})
            found.append(self.weights.gradients.clone())
        return found

    @property
    def captured_rows(self) -> set[int]:
        """The rows of the shapes that have a graph."""
        return {shape[0][1][0] for shape, graph in self.graphs.captured.items() if graph is not None}


def alike(one: Layer, other: Layer, *weights: float) -> bool:
    pairs = zip(one.passes(*weights), other.passes(*weights), strict=True)
    return all(torch.equal(mine[name], theirs[name]) for mine, theirs in pairs for name in mine)


def sound(gradients: dict[str, torch.Tensor]) -> None:
    pass


def doubled(gradients: dict[str, torch.Tensor]) -> None:
    for gradient in gradients.values():
        gradient.mul_(2.0)


def without_a(gradients: dict[str, torch.Tensor]) -> None:
    gradients["lora_A"].zero_()


@pytest.mark.parametrize(
    "weights", [(1, 1, 1, 1), (1, 0, 1, 1), (0, 1, 1, 1), (1, 0, 1, 0, 1), (0, 0, 0, 1, 1)], ids=str
)
def test_samples_of_no_weight_prove_no_graph(weights: tuple[float, ...]) -> None:
    """As the micro-batches that fill up a bucket's last one: a graph that counts double gives their gradients too."""
    layer, control = Layer(doubled), Layer(sound)
    assert alike(layer, Layer(sound), *weights)
    assert layer.replays == 1 and len(layer.said) == 1 and "different gradients" in layer.said[0]
    control.passes(*weights)
    assert control.replays == len(weights) - max(1, weights.index(1)) - (weights[1] == 0 and weights[0] == 1)
    assert control.said == []


@pytest.mark.parametrize("b", [0.0, 1e-4], ids=["before the first update", "after it"])
def test_gradients_of_a_are_looked_at_by_themselves(b: float) -> None:
    """B's gradients are so much larger that the whole does not show it; while B is zero there are none to compare."""
    layer, control = Layer(without_a, b), Layer(sound, b)
    for each in (layer, control):
        each.passes(1, 1, 1)
        each.weights.parameters["lora_B"].fill_(1e-4)
    assert alike(layer, Layer(sound, 1e-4), 1, 1, 1)
    assert layer.replays == 1 and len(layer.said) == 1
    control.passes(1, 1, 1)
    assert control.said == [] and control.replays == (3 if b == 0.0 else 5)


def test_after_a_capture_that_failed_the_next_one_has_a_pool_of_its_own() -> None:
    layer, pools = Layer(sound), [0]

    def refuses(run: Callable[[], Passed]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    def new_capture() -> Any:
        pools[0] += 1
        return refuses if pools[0] == 1 else layer.capture

    layer.graphs.new_capture = new_capture
    for rows in (1, 1, 2, 2, 3, 3):
        layer.graphs.run(layer.eager, {"x": torch.ones(rows, 3), "weight": torch.ones(rows)}, {})
    assert len(layer.said) == 1 and pools[0] == 2
    assert [graph is None for graph in layer.graphs.captured.values()] == [True, False, False]


@pytest.mark.parametrize("exact", [True, False])
def test_comparing_takes_no_memory_of_the_size_of_the_weights(exact: bool) -> None:
    """On a card that a step has filled there is none."""
    layer = Layer(sound)
    leaves = {"lora_A": torch.nn.Parameter(torch.ones(1000, 100)), "lora_B": torch.nn.Parameter(torch.ones(100, 1000))}
    graphs = Graphs(FlatWeights(leaves), exact, listening(layer.said))
    made_N, passed = torch.ones_like(graphs.weights.gradients), Passed(torch.ones(()), torch.ones(2))
    graphs.weights.gradients.fill_(1.0)
    with Ledger(iter([made_N, graphs.weights.gradients])) as ledger:
        assert graphs._agree(passed, passed, made_N)
    assert ledger.peak_bytes <= made_N.nbytes // 4 + 8192  # of bools, where bits are compared
    with Ledger(iter([made_N])) as ledger:
        made_N - made_N  # noqa: B018
    assert ledger.peak_bytes >= made_N.nbytes


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage at each capture takes longer than these passes."""
    monkeypatch.setattr(graphs_module, "empty_pools", lambda: None)


FULL = list(range(1, MAX_GRAPHS + 1))  # rows of shapes that take all places
LATE = MAX_GRAPHS + 1


def full(of: Layer) -> Layer:
    """All places are taken: by 5 rows with two passes, and by the others with three."""
    of.passes_of([rows for rows in FULL for _ in range(2 if rows == 5 else 3)])
    assert of.captured_rows == set(FULL) and of.said == []
    return of


def test_a_frequent_shape_that_comes_late_replaces_the_least_used(quick: None) -> None:
    layer = full(Layer(sound))
    dropped = next(weakref.ref(graph) for shape, graph in layer.graphs.captured.items() if shape[0][1][0] == 5)
    layer.passes_of([LATE] * 4)
    assert layer.captured_rows == set(FULL), "four are twice as many as two, but inputs of two passes are needed"
    assert len(layer.said) == 1 and str(MAX_GRAPHS) in layer.said[0]
    stream, replays = [LATE, LATE, 1, 5, LATE], layer.replays
    found, wanted = layer.passes_of(stream), Layer(sound).passes_of(stream, captures=False)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert layer.captured_rows == {*FULL, LATE} - {5} and dropped() is None and len(layer.said) == 1
    assert layer.replays == replays + 4, "its proof, two of its own and one of another: the dropped shape is eager"


STREAMS = {
    "in turn": [1 + number % LATE for number in range(10 * LATE)],
    "shuffled epochs": [rows for seed in range(10) for rows in random.Random(seed).sample([*FULL, LATE], LATE)],
    "drawn": random.Random(0).choices(range(1, 2 * MAX_GRAPHS), k=400),
}


@pytest.mark.parametrize("name", STREAMS)
def test_equally_frequent_shapes_do_not_replace_each_other(
    name: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, control = Layer(sound), Layer(sound)
    layer.passes_of(STREAMS[name])
    assert layer.captures <= MAX_GRAPHS + 3 and len(layer.captured_rows) == MAX_GRAPHS
    monkeypatch.setattr(graphs_module, "TIMES_AS_MANY", 1)
    control.passes_of(STREAMS[name])
    assert control.captures > MAX_GRAPHS + 6


def test_one_frequent_shape_among_endless_others_is_captured(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are counted, of no more shapes than ``MAX_COUNTED``."""
    monkeypatch.setattr(graphs_module, "MAX_COUNTED", MAX_GRAPHS + 4)
    layer = full(Layer(sound))
    layer.passes_of(rows for other in range(30) for rows in ((LATE + 1 + other, LATE) if other % 3 else (LATE,)))
    assert layer.captured_rows == {*FULL, LATE} - {5}
    assert len(layer.graphs._passes) == MAX_GRAPHS + 4 and not layer.graphs._seen


def refuses(run: Callable[[], Passed]) -> Replay:
    raise RuntimeError("out of nodes")


def test_a_shape_that_cannot_be_captured_stays_eager_and_takes_no_place(quick: None) -> None:
    layer, capture = full(Layer(sound)), Layer.capture
    layer.graphs._capture = refuses
    layer.passes_of([LATE] * 5)
    layer.graphs._capture = lambda run: capture(layer, run)
    layer.passes_of([LATE] * 5 + FULL * 2)
    assert layer.captured_rows == set(FULL), "the one that was dropped has come back"
    assert len(layer.said) == 2 and "out of nodes" in layer.said[1]


def test_captures_that_fail_for_some_time_cost_no_place(quick: None) -> None:
    layer, capture = full(Layer(sound)), Layer.capture
    layer.graphs._capture, layer.graphs.new_capture = refuses, lambda: refuses
    for late in range(LATE, LATE + MAX_GRAPHS):
        layer.passes_of([late] * 10)
    assert len(layer.captured_rows) < MAX_GRAPHS
    layer.graphs._capture, layer.graphs.new_capture = None, lambda: lambda run: capture(layer, run)
    layer.passes_of(FULL * 3)
    assert layer.captured_rows == set(FULL)


def test_a_graph_that_replaces_the_only_one_has_a_pool_of_its_own(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory pool ends with its last graph."""
    monkeypatch.setattr(graphs_module, "MAX_GRAPHS", 1)
    layer, pools = Layer(sound), [0]

    def new_capture() -> Any:
        pools[0] += 1
        return layer.capture

    layer.graphs.new_capture = new_capture
    layer.passes_of([1, 1, 2, 2, 2, 2, 2, 2])
    assert layer.captured_rows == {2} and pools == [2]
