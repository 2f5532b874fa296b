"""Memory that runs out in a step: the update stays the same, and no sample is lost or repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import Usage
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device, fingerprint
from lora_rocm.errors import MachineError
from lora_rocm.families.objectives.base import Prediction
from lora_rocm.hardware.memory_budget import GIB
from lora_rocm.loader.batch import Batch, split
from lora_rocm.memory import oom_recovery
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import loop
from lora_rocm.train.loop import BatchPass
from tests.tiny_models import FEW_TARGETS
from tests.train.runs import bytes_of, make_recipe, material, start
from tests.train.test_loop import EFFECTIVE_BATCH, WIDTH, Corruptor, NoisyLine, Rig, batches, same
from tests.wording import saying, says

__all__ = ["material"]

STEPS = 5
FULL = "HIP out of memory. Tried to allocate 2.00 MiB."


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for garbage in a process as large as the tests' takes longer than the steps here."""
    monkeypatch.setattr(oom_recovery, "empty_pools", lambda: None)


class FullAt(TorchDispatchMode):
    """A device that is full at chosen operations, counted while ``counting``; without a choice it only counts."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.seen, self.counting = set(at), 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.counting:
            self.seen += 1
            if self.seen in self.at:
                raise torch.OutOfMemoryError(FULL)
        return func(*args, **(kwargs or {}))


class Watched:
    """A rig with a device that is full now and then; the samples of each update are recorded."""

    def __init__(self, mode: FullAt, *, in_update: bool = False, follow: dict[int, int] | None = None, **how: Any):
        self.rig = rig = Rig(**how)
        self.parts: dict[int, int] = {}  # iteration -> in how many parts the update was computed
        self.samples: list[list[str]] = []  # of each update that was queued
        self.gradients_left = False
        trainer = rig.trainer
        work_of, update_of, open_batches = trainer._work, trainer._update, trainer.open_batches

        def work(waiting: Iterator[Batch]) -> BatchPass | None:
            mode.counting = not in_update
            done = work_of(waiting)
            mode.counting = False
            if done is None:
                self.gradients_left |= any(p.grad is not None for p in rig.parameters.values())
                self.gradients_left |= bool(rig.optimizer.weights.gradients.any())
            return done

        def update(done: BatchPass) -> Any:
            self.parts[done.iteration] = trainer.relief.parts
            self.samples.append(done.samples)
            mode.counting = in_update
            pending = update_of(done)
            mode.counting = False
            return pending

        def opened(first: int) -> Iterator[Batch]:
            for batch in open_batches(first):
                if follow is not None:
                    trainer.relief.parts = follow[batch.iteration]
                yield batch

        trainer._work, trainer._update, trainer.open_batches = work, update, opened  # type: ignore[method-assign]
        with mode:
            rig.fit(STEPS)


def steps_of(rig: Rig) -> list[dict[str, Any]]:
    """The step events without times and counts of sent work."""
    keys = ("updates", "iteration", "loss", "grad_norm", "learning_rate", "loss_scale")
    return [{key: event[key] for key in keys} for event in rig.of_type("step")]


def operations(**how: Any) -> int:
    Rig(**how).fit(1)  # what is made once in a process
    mode = FullAt()
    Watched(mode, **how)
    return mode.seen


@pytest.mark.parametrize(("scale", "accumulation", "tries"), [
    pytest.param(False, 1, 5, id="-1"),
    pytest.param(True, 2, 4, id="fp16 scale-2"),
    pytest.param(False, 1, 20, id="-1, more often", marks=pytest.mark.slow),
    pytest.param(True, 2, 20, id="fp16 scale-2, more often", marks=pytest.mark.slow),
    pytest.param(False, 2, 20, id="-2", marks=pytest.mark.slow),
    pytest.param(True, 1, 20, id="fp16 scale-1", marks=pytest.mark.slow),
])  # fmt: skip
def test_memory_that_runs_out_at_any_operation_costs_no_sample_and_no_byte(
    accumulation: int, scale: bool, tries: int
) -> None:
    """Once or twice in a run, anywhere in drawing, copying, forward and backward, with or without an update in
    progress.
    """
    how = {"accumulation": accumulation, "scale": scale}
    number = operations(**how)
    assert number > 100 * STEPS // 2
    generator = random.Random(f"{accumulation} {scale}")
    untouched = Rig(**how).fit(STEPS)
    for _ in range(tries):
        most = 2 // accumulation  # then a part is one sample
        hits = sorted(generator.sample(range(1, number + 1), generator.randint(1, most)))
        hit = Watched(FullAt(*hits), **how)
        assert not hit.gradients_left and hit.rig.finished
        changes = [event["id"] for event in hit.rig.of_type("change")]
        incidents = hit.rig.of_type("incident")
        assert changes and set(changes) == {"micro-batch-halved"} and len(incidents) == len(changes), hits
        assert all(event["kind"] == "out-of-memory" and FULL in event["detail"] for event in incidents)
        whole = [[f"image-{iteration}-{row}" for row in range(EFFECTIVE_BATCH)] for iteration in range(STEPS)]
        assert hit.samples == whole, hits
        reference = Watched(FullAt(), follow=hit.parts, **how)
        assert same(hit.rig, reference.rig), hits
        assert steps_of(hit.rig) == steps_of(reference.rig)
        for name, weight in untouched.weights().items():
            torch.testing.assert_close(hit.rig.weights()[name], weight, rtol=1e-5, atol=1e-6)


def test_from_the_first_step_on_it_is_the_run_that_began_with_so_many_parts() -> None:
    hit = Watched(FullAt(operations() // STEPS // 2))
    assert set(hit.parts.values()) == {2}
    assert same(hit.rig, Rig(parts=2).fit(STEPS))


def test_gradients_that_stay_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without dropping what was half added up, the same fault does harm."""
    at = operations() // STEPS - 1  # the end of a backward pass: some gradients are there already
    monkeypatch.setattr("lora_rocm.optim.base.GatedOptimizer.drop_gradients", lambda self: None)
    hit = Watched(FullAt(at))
    assert hit.gradients_left
    assert not same(hit.rig, Watched(FullAt(), follow=hit.parts).rig)


def test_a_step_that_is_not_made_again_loses_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the list of samples without the repeat."""
    original = Rig().trainer.open_batches
    monkeypatch.setattr("tests.train.test_loop.batches", lambda *how: lambda first: original(first + (first > 0)))
    hit = Watched(FullAt(operations() // STEPS * 3 // 2))
    assert [names[0] for names in hit.samples] != [f"image-{iteration}-0" for iteration in range(STEPS)]


def test_an_update_that_has_to_be_sent_again_and_a_full_device_at_once() -> None:
    """The update in progress turns out to be spoilt while memory runs out for the next one."""
    clean = Watched(FullAt())
    number = operations()
    for nth in range(2, 6):
        for at in (number * nth // 7, number * (nth + 1) // 7):
            hit = Watched(FullAt(at), copy=Corruptor({2 * nth}, ("unpinned",)))
            assert [event["updates"] for event in hit.rig.of_type("step")] == list(range(1, STEPS + 1))
            for name, weight in clean.rig.weights().items():
                torch.testing.assert_close(hit.rig.weights()[name], weight, rtol=1e-5, atol=1e-6)


def test_what_is_tried_in_order_and_the_words_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is always full: parts down to single samples, then recomputing, then the error, with all tried."""
    rig = Rig(recomputes=False)
    parts: list[int] = []

    def full(model: Any, batch: dict[str, Tensor], draws: Any) -> Prediction:
        parts.append(len(batch["x"]))
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(rig.trainer.family, "predict", full)
    with pytest.raises(MachineError) as caught:
        rig.fit(STEPS)
    assert caught.value.code == "out-of-memory" and caught.value.where == FULL
    assert "gradient_checkpointing" in caught.value.fix and caught.value.__context__ is None
    assert parts == [4, 2, 1, 1]
    assert [event["id"] for event in rig.of_type("change")] == ["micro-batch-halved"] * 2 + ["checkpointing"]
    assert rig.trainer.position.updates == 0 and rig.of_type("step") == []


def test_recomputed_activations_give_the_same_bytes() -> None:
    """Single samples, then full once more: activations are computed again, also where memory runs out doing that."""
    number = operations(parts=EFFECTIVE_BATCH)
    plain = Rig(parts=EFFECTIVE_BATCH).fit(STEPS)
    for at in range(number // 7, number, number // 7):
        hit = Watched(FullAt(at), parts=EFFECTIVE_BATCH, recomputes=False)
        assert [event["id"] for event in hit.rig.of_type("change")] == ["checkpointing"]
        assert same(hit.rig, plain)
    with pytest.raises(MachineError, check=saying("memory/not-enough-memory")):
        Watched(FullAt(40, 240), parts=EFFECTIVE_BATCH, recomputes=False)


def test_other_errors_of_a_step_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken(*batch: Any) -> Prediction:
        raise RuntimeError("HIP error: an illegal memory access was encountered")

    monkeypatch.setattr(rig.trainer.family, "predict", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        rig.fit(STEPS)
    assert rig.of_type("change") == []


@pytest.mark.parametrize("at", [1, 5, 20, 40])
def test_an_update_that_runs_out_of_memory_leaves_the_loop(at: int) -> None:
    """Half of it may have been made, so nothing is tried again here."""
    with pytest.raises(torch.OutOfMemoryError):
        Watched(FullAt(at), in_update=True)


def test_the_first_update_allocates_nothing_that_stays() -> None:
    optimizer = Rig().optimizer
    before = {name: tensor.data_ptr() for name, tensor in optimizer.state().items()}
    assert len(before) == 3 + 2 * len(optimizer.parameters)
    optimizer.weights.gradients.fill_(1.0)
    optimizer.step(0, torch.tensor(0.0))
    assert {name: tensor.data_ptr() for name, tensor in optimizer.state().items()} == before


def test_state_that_is_there_from_the_start_is_that_which_pytorch_makes() -> None:
    ours = Rig().optimizer
    theirs = {name: nn.Parameter(weight.clone()) for name, weight in ours.parameters.items()}
    late = torch.optim.AdamW(
        theirs.values(), lr=1e-2, weight_decay=ours.section.weight_decay, fused=True
    )  # makes it then
    ours.weights.gradients.copy_(torch.randn(ours.weights.gradients.shape, generator=torch.Generator().manual_seed(1)))
    gradients = ours.weights.views(ours.weights.gradients)
    gradients = {name: gradients[name] / max(1.0, float(ours.weights.gradients.norm() + 1e-6)) for name in theirs}
    for name, parameter in theirs.items():
        parameter.grad = gradients[name].clone()
    ours.step(0, torch.tensor(0.0))
    late.step()
    state = ours.state()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours.parameters[name], parameter.detach())
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[f"{name}.{moment}"], late.state[parameter][moment])


class Gauge:
    """The memory in use on the device at each time that memory ran out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *seen: Usage) -> None:
        self.emptied = 0
        left = list(seen)
        monkeypatch.setattr(loop, "usage", lambda device: left.pop(0))
        monkeypatch.setattr(oom_recovery, "empty_pools", self.empty)

    def empty(self) -> None:
        self.emptied += 1


IN_PIECES, WHOLE = Usage(6 * GIB, 8 * GIB), Usage(7 * GIB, 8 * GIB)


def test_memory_in_pieces_is_given_back_before_anything_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = Gauge(monkeypatch, IN_PIECES)
    hit = Watched(FullAt(operations() // 2))
    assert gauge.emptied == 1 and hit.rig.of_type("change") == []
    assert same(hit.rig, Rig().fit(STEPS))
    (incident,) = hit.rig.of_type("incident")
    assert says(incident["action"], "memory/6-00-gib-in-tensors-8-00")


def test_memory_that_is_really_full_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    Gauge(monkeypatch, WHOLE)
    hit = Watched(FullAt(operations() // 2))
    assert [event["id"] for event in hit.rig.of_type("change")] == ["micro-batch-halved"]


def test_pools_that_are_in_pieces_again_soon_were_no_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    Gauge(monkeypatch, IN_PIECES, IN_PIECES)
    number = operations()
    hit = Watched(FullAt(number // 2, number // 2 + 10))
    assert [event["id"] for event in hit.rig.of_type("change")] == ["micro-batch-halved"]
    Gauge(monkeypatch, IN_PIECES, IN_PIECES)
    monkeypatch.setattr(oom_recovery, "EMPTY_EVERY_UPDATES", 1)
    hit = Watched(FullAt(number // 3, number - 10))
    assert hit.rig.of_type("change") == [] and len(hit.rig.of_type("incident")) == 2


def random_batch(count: int, weights: list[float]) -> Batch:
    generator = torch.Generator().manual_seed(count)
    tensors = {"x": torch.randn(count, WIDTH, generator=generator), "weight": torch.tensor(weights)}
    return Batch(
        tensors=tensors,
        fingerprints={name: fingerprint(tensor) for name, tensor in tensors.items()},
        sample_keys=tuple(f"image-{row}" for row in range(count)),
        positions=tuple(range(count)),
        shape=SampleShape.of(tokens=WIDTH),
        iteration=0,
        micro=0,
        is_last=True,
        shares=(1,) * count,
    )


class Recording(NoisyLine):
    """Writes down what was drawn for whom."""

    def __init__(self) -> None:
        self.noise: list[Tensor] = []

    def draw(self, batch: dict[str, Tensor], seeds: list[int]) -> Any:
        draws = super().draw(batch, seeds)
        self.noise.append(draws.tensors["noise"])
        return draws


def gradient_of(micro_batches: list[Batch], parts: int) -> tuple[dict[str, Tensor], Tensor, BatchPass]:
    """The gradient of one effective batch by the loop's own code, the noise of its rows, and its report."""
    rig, family = Rig(accumulation=1), Recording()
    rig.trainer.family, rig.trainer.accumulation, rig.trainer.relief.parts = family, len(micro_batches), parts
    rig.trainer.transfer = DeviceTransfer(torch.device("cpu"), pin=False, copy=copy_to_device)
    work = rig.trainer._work(iter(micro_batches))
    assert work is not None and float(rig.trainer.transfer.bad) == 0.0
    weights = rig.optimizer.weights
    gradient = {name: gradient.clone() for name, gradient in weights.views(weights.gradients).items()}
    return gradient, torch.cat(family.noise), work


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=1, max_size=9), min_size=1, max_size=3),
    st.sampled_from([2, 3, 4, 8, 16]),
)
def test_the_summed_gradient_of_the_parts_is_that_of_the_whole(weights: list[list[float]], parts: int) -> None:
    """Filling rows have weight 0: a part may consist only of such rows."""
    micro_batches = [random_batch(len(some), some) for some in weights]
    whole, noise, work = gradient_of(micro_batches, 1)
    divided, same_noise, divided_work = gradient_of(micro_batches, parts)
    assert torch.equal(noise, same_noise) and divided_work.samples == work.samples
    torch.testing.assert_close(sum(divided_work.losses), sum(work.losses), rtol=1e-5, atol=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(divided[name], gradient, rtol=1e-5, atol=1e-6)


@given(st.integers(1, 20), st.integers(1, 32))
def test_parts_are_rows_in_order_each_once(count: int, parts: int) -> None:
    batch = random_batch(count, [1.0 / count] * count)
    pieces = split(batch, parts)
    assert len(pieces) <= parts and max(len(piece.positions) for piece in pieces) == -(-count // parts)
    assert sum((piece.sample_keys for piece in pieces), ()) == batch.sample_keys
    for group in ("tensors", "fingerprints"):
        for name, rows in getattr(batch, group).items():
            assert torch.equal(torch.cat([getattr(piece, group)[name] for piece in pieces]), rows)
    assert all(piece.iteration == 0 and piece.shape == batch.shape for piece in pieces)


def test_gradients_without_their_weights_differ() -> None:
    """Negative control: parts that each take their own mean are another gradient."""
    batch = random_batch(4, [0.5, 0.25, 0.25, 0.0])
    whole, _, _ = gradient_of([batch], 1)
    tensors = {**batch.tensors, "weight": torch.full((4,), 0.25)}
    fingerprints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
    even = replace(batch, tensors=tensors, fingerprints=fingerprints)
    other, _, _ = gradient_of([even], 2)
    assert not torch.allclose(whole["weight"], other["weight"], rtol=1e-5, atol=1e-6)


def test_the_rig_is_a_linear_layer() -> None:
    """The assumption of the tests above: batches of the rig have rows enough to be cut."""
    first = next(batches(1)(0))
    assert len(first.positions) == EFFECTIVE_BATCH and isinstance(Rig().trainer.model.components["net"], nn.Linear)


def test_half_an_update_is_never_saved(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out between the weights and their average: the run ends, and resumes from the checkpoint before."""
    recipe = make_recipe(
        material,
        lora={"targets": [FEW_TARGETS]},
        train={"max_train_steps": 3, "ema_decay": 0.9, "gradient_accumulation_steps": 1, "batch_size": 1},
    )
    assert start(recipe, tmp_path / "straight")
    average = GatedOptimizer._average

    def full(self: GatedOptimizer, updates: int, held: Tensor) -> None:
        if updates == 2:
            raise torch.OutOfMemoryError(FULL)
        average(self, updates, held)

    with monkeypatch.context() as patch:
        patch.setattr(GatedOptimizer, "_average", full)
        with pytest.raises(torch.OutOfMemoryError):
            start(recipe, tmp_path / "hit")
    assert [updates for updates, _ in RunDir(tmp_path / "hit").list_checkpoints()] == [2]
    assert start(recipe, tmp_path / "hit")
    assert bytes_of(tmp_path / "hit") == bytes_of(tmp_path / "straight")
