"""The loop: same updates despite interruptions, splits and corrupted transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.transfer import DeviceTransfer, copy_to_device, fingerprint
from lora_rocm.errors import NonFiniteError, TransferError
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.objectives.base import Draws, Prediction
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from lora_rocm.loader.batch import Batch
from lora_rocm.memory.oom_recovery import Relief
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import AdamwSection, OptimSection, ProdigySection
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.engine import Engine
from lora_rocm.train.loop import MAX_NONFINITE_IN_A_ROW, Trainer
from tests.optim.test_base import SECTIONS
from tests.wording import saying, says

CPU = torch.device("cpu")
EFFECTIVE_BATCH, WIDTH = 4, 8


class NoisyLine:
    """A family in miniature, and its objective: predict the noise that was mixed into x."""

    @property
    def objective(self) -> NoisyLine:
        return self

    def draw(self, batch: dict[str, Tensor], seeds: list[int]) -> Draws:
        noise_BD = torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        return Draws({"noise": noise_BD})

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
        predicted_BD = model.components["net"](batch["x"] + draws["noise"])
        return Prediction(predicted_BD, draws["noise"], predicted_BD.new_ones(len(predicted_BD)))

    def recompute_activations(self, model: LoadedModel, run: Any = None) -> None:
        net = model.components["net"]
        inner = net.forward
        net.forward = lambda x_BD: checkpoint(inner, x_BD, use_reentrant=False)  # type: ignore[method-assign]


def batches(
    accumulation: int, poison: int | None = None, value: float = float("nan")
) -> Callable[[int], Iterator[Batch]]:
    def open_from(first: int) -> Iterator[Batch]:
        iteration = first
        while True:
            generator = torch.Generator().manual_seed(iteration)
            x_ND = torch.randn(EFFECTIVE_BATCH, WIDTH, generator=generator)
            if iteration == poison:
                x_ND[1, 0] = value
            size = EFFECTIVE_BATCH // accumulation
            for micro in range(accumulation):
                rows = slice(micro * size, (micro + 1) * size)
                tensors = {"x": x_ND[rows].clone(), "weight": torch.full((size,), 1.0 / EFFECTIVE_BATCH)}
                yield Batch(
                    tensors=tensors,
                    fingerprints={name: fingerprint(tensor) for name, tensor in tensors.items()},
                    sample_keys=tuple(f"image-{iteration}-{row}" for row in range(EFFECTIVE_BATCH)[rows]),
                    positions=tuple(range(EFFECTIVE_BATCH)[rows]),
                    shape=SampleShape.of(tokens=WIDTH),
                    iteration=iteration,
                    micro=micro,
                    is_last=micro + 1 == accumulation,
                    shares=(1,) * size,
                )
            iteration += 1

    return open_from


class Rig:
    """A trainer with its events and weights at hand."""

    def __init__(
        self,
        *,
        accumulation: int = 1,
        copy: Callable[..., Tensor] = copy_to_device,
        poison: int | None = None,
        value: float = float("nan"),
        scale: bool = False,
        hooks: list[Any] | None = None,
        stop_after: int | None = None,
        parts: int = 1,
        recomputes: bool = True,
        optim: OptimSection | None = None,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        torch.manual_seed(0)
        net = nn.Linear(WIDTH, WIDTH)
        self.parameters = dict(net.named_parameters())
        optim = optim or AdamwSection(learning_rate=1e-2)
        groups: list[dict[str, Any]] = [{"names": list(self.parameters), "lr": optim.learning_rate}]
        weights = FlatWeights(self.parameters)
        self.optimizer = GatedOptimizer(
            weights, groups, optim, max_train_steps=100, ema_decay=0.9, use_loss_scale=scale
        )
        family, model = NoisyLine(), LoadedModel({"net": net}, torch.float32, CPU)
        context = RunContext(
            self.emit,
            should_stop=lambda: stop_after is not None and self.trainer.position.updates + 1 >= stop_after,
        )
        self.trainer = Trainer(
            family=family,  # type: ignore[arg-type]
            model=model,
            engine=Engine(family, model, weights, self.optimizer.loss_scale, nullcontext),  # type: ignore[arg-type]
            optimizer=self.optimizer,
            transfer=DeviceTransfer(CPU, pin=False, copy=copy),
            open_batches=batches(accumulation, poison, value),
            seed=7,
            dropout=DropoutDraws([]),
            position=Position(),
            relief=Relief(family, model, EFFECTIVE_BATCH // accumulation, parts, recomputes, context),  # type: ignore[arg-type]
            context=context,
            hooks=hooks or [],
        )

    def emit(self, event: Event) -> None:
        self.events.append(event.to_json())

    def fit(self, steps: int) -> Rig:
        self.finished = self.trainer.fit(steps)
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def of_type(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == event_type]


def same(left: Rig, right: Rig) -> bool:
    mine, theirs = {**left.weights(), **left.optimizer.state()}, {**right.weights(), **right.optimizer.state()}
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


class Corruptor:
    """Spoils the n-th tensor called x (a batch of data) by zeroing it, for some methods of the ladder."""

    def __init__(self, nth: set[int], methods: tuple[str, ...]) -> None:
        self.nth, self.methods, self.seen = nth, methods, 0

    def __call__(self, tensor: Tensor, device: torch.device, method: str) -> Tensor:
        arrived = copy_to_device(tensor, device, method)
        if tensor.ndim == 2 and tensor.dtype is torch.float32:
            self.seen += 1
            if self.seen in self.nth and method in self.methods:
                return torch.zeros_like(arrived)
        return arrived


def test_it_learns() -> None:
    rig = Rig().fit(80)
    losses = [event["loss"] for event in rig.of_type("step")]
    assert rig.finished and len(losses) == 80
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert [event["updates"] for event in rig.of_type("step")] == list(range(1, 81))


def test_the_first_step_is_reported_before_the_second_begins() -> None:
    """The second pass is captured, which takes a second. Later a step is reported while the next one computes."""
    rig, passes, at_report = Rig(), list[int](), list[int]()
    run, emit = rig.trainer.engine.run, rig.emit
    rig.trainer.engine.run = lambda *given: (passes.append(1), run(*given))[1]  # type: ignore[method-assign]

    def reported(event: Event) -> None:
        at_report.append(len(passes))
        emit(event)

    rig.trainer.context = replace(rig.trainer.context, emit=reported)
    rig.fit(4)
    assert at_report == [1, 3, 4, 4]


def test_the_epoch_of_an_update_is_how_many_are_finished() -> None:
    """1.0 after the last update of the first epoch, not 2. The number of iterations counts: a skipped batch is used."""
    rig = Rig()
    rig.trainer.steps_per_epoch = 3
    assert [event["epoch"] for event in rig.fit(7).of_type("step")] == [
        0.333333, 0.666667, 1.0, 1.333333, 1.666667, 2.0, 2.333333,
    ]  # fmt: skip


class Measured(NoisyLine):
    """It measures two values of each sample in addition to the loss."""

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
        first_B = batch["x"][:, 0]
        return replace(super().predict(model, batch, draws), measures={"first": first_B, "odd": first_B * torch.nan})


@pytest.mark.parametrize(("accumulation", "parts"), [(1, 1), (2, 1), (1, 2)])
def test_measures_of_a_step_are_means_over_its_samples_and_change_nothing(accumulation: int, parts: int) -> None:
    """Values that are not finite are omitted. The optimizer logs a value, too."""
    plain, rig = (prodigy_rig(accumulation=accumulation, parts=parts) for _ in range(2))
    rig.trainer.family = rig.trainer.engine.family = Measured()  # type: ignore[assignment]
    rig.fit(5)
    assert same(plain.fit(5), rig)
    for step, other in zip(rig.of_type("step"), plain.of_type("step"), strict=True):
        parts_of_it = islice(batches(accumulation)(step["iteration"]), accumulation)
        x_ND = torch.cat([batch.tensors["x"] for batch in parts_of_it])
        assert step["measures"] == {"first": pytest.approx(float(x_ND[:, 0].mean()), abs=1e-6)}
        assert step["optimizer"] == other["optimizer"] != {} and other["measures"] == {}


def prodigy_rig(**how: Any) -> Rig:
    return Rig(optim=ProdigySection(d0=1e-3, weight_decay=0.0), **how)


def test_prodigy_learns_and_each_step_tells_its_estimate() -> None:
    rig = prodigy_rig().fit(80)
    steps = rig.of_type("step")
    assert sum(step["loss"] for step in steps[-10:]) < 0.8 * sum(step["loss"] for step in steps[:10])
    estimates = [step["optimizer"]["prodigy_d"] for step in steps]
    assert estimates == sorted(estimates) and estimates[0] >= 0.99e-3 and estimates[-1] > 2e-3
    rates = [step["optimizer"]["effective_learning_rate"] for step in steps]
    assert rates[1:] == estimates[:-1] and {step["learning_rate"] for step in steps} == {1.0}
    assert {step["optimizer"] == {} for step in Rig().fit(2).of_type("step")} == {True}  # AdamW reports nothing


@pytest.mark.parametrize("nth", [{9}, {4, 15}], ids=str)
def test_prodigy_is_not_moved_by_a_corrupted_batch(nth: set[int]) -> None:
    clean, hit = prodigy_rig().fit(12), prodigy_rig(copy=Corruptor(nth, ("unpinned",))).fit(12)
    assert same(clean, hit) and hit.of_type("incident")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scale", [False, True])
def test_prodigy_passes_over_what_is_not_finite(value: float, scale: bool) -> None:
    rig = prodigy_rig(poison=5, value=value, scale=scale).fit(12)
    assert rig.finished and [event["kind"] for event in rig.of_type("incident")] == ["nonfinite"]
    assert all(bool(tensor.isfinite().all()) for tensor in rig.optimizer.state().values())


@pytest.mark.parametrize("optim", SECTIONS, ids=lambda section: section.optimizer)
def test_a_stopped_run_goes_on_with_the_same_bytes(optim: OptimSection) -> None:
    straight, stopped = Rig(optim=optim).fit(8), Rig(optim=optim).fit(5)
    resumed, forgetful = Rig(optim=optim), Rig(optim=optim)
    for rig in (resumed, forgetful):  # the second is the negative control
        with torch.no_grad():
            for name, weight in stopped.weights().items():
                rig.parameters[name].copy_(weight)
        rig.trainer.position = replace(stopped.trainer.position)
    resumed.optimizer.load(stopped.optimizer.state(), stopped.optimizer.ema)
    forgetful.optimizer.state_guard.reset()
    assert same(resumed.fit(8), straight) and not same(forgetful.fit(8), straight)


@pytest.mark.parametrize("nth", [{1}, {9}, {4, 15}], ids=str)
def test_a_corrupted_batch_is_sent_again_and_the_result_is_that_of_a_clean_run(nth: set[int]) -> None:
    clean = Rig().fit(12)
    hit = Rig(copy=Corruptor(nth, ("unpinned",))).fit(12)
    assert same(clean, hit)
    assert hit.trainer.transfer.failures == len(nth) == len(hit.of_type("incident"))
    assert hit.of_type("incident")[0]["samples"]


def test_without_the_guard_the_same_fault_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the corruption of the test above does harm when nobody looks."""
    clean = Rig().fit(12)
    monkeypatch.setattr("lora_rocm.device.process_group.constant", lambda tensor, name: tensor)  # it may outlive this
    monkeypatch.setattr(
        "lora_rocm.device.transfer.fingerprint", lambda tensor_B: torch.zeros(len(tensor_B), dtype=torch.int64)
    )
    monkeypatch.setattr(
        "tests.train.test_loop.fingerprint", lambda tensor_B: torch.zeros(len(tensor_B), dtype=torch.int64)
    )
    monkeypatch.setattr(
        "lora_rocm.train.loop.fingerprint", lambda tensor_B: torch.zeros(len(tensor_B), dtype=torch.int64)
    )
    assert not same(clean, Rig(copy=Corruptor({9}, ("unpinned",))).fit(12))


def test_when_every_method_fails_nothing_is_trained_on_it() -> None:
    rig = Rig(copy=Corruptor(set(range(9, 99)), ("unpinned", "clone", "chunked")))
    reference = Rig().fit(4)
    with pytest.raises(TransferError, match="image-4"):
        rig.fit(12)
    assert rig.trainer.position.updates == 4 and same(rig, reference)


def test_splitting_into_micro_batches_gives_the_same_updates_to_rounding() -> None:
    whole = Rig().fit(6)
    for accumulation in (2, 4):
        split = Rig(accumulation=accumulation).fit(6)
        for name, weight in whole.weights().items():
            torch.testing.assert_close(split.weights()[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("scale", [False, True])
def test_a_nonfinite_update_is_skipped_and_the_guilty_sample_named(accumulation: int, scale: bool) -> None:
    rig = Rig(accumulation=accumulation, poison=3, scale=scale).fit(6)
    incident = rig.of_type("incident")
    assert [(event["kind"], event["samples"]) for event in incident] == [("nonfinite", ["image-3-1"])]
    assert says(incident[0]["detail"], "train/not-finite-is-the-loss-of-image")
    assert rig.trainer.position == Position(iteration=7, updates=6)
    assert all(torch.isfinite(weight).all() for weight in rig.weights().values())


def test_where_every_loss_is_finite_all_samples_are_named() -> None:
    rig = Rig()
    rig.parameters["weight"].register_hook(
        lambda grad: grad * float("nan") if rig.trainer.position.updates == 2 else grad
    )
    rig.fit(6)
    first = rig.of_type("incident")[0]
    assert first["kind"] == "nonfinite" and first["samples"] == [
        f"image-{first['iteration']}-{row}" for row in range(4)
    ]
    assert says(first["detail"], "train/the-loss-of-each-sample-is-finite")


def test_many_nonfinite_updates_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def broken(model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
        made = batch["x"] * model.components["net"].weight.sum() * float("nan")
        return Prediction(made, torch.zeros_like(made), made.new_ones(len(made)))

    monkeypatch.setattr(rig.trainer.family, "predict", broken)
    with pytest.raises(NonFiniteError, check=saying("train/4-times-in-a-row")):
        rig.fit(9)
    assert rig.trainer.position == Position(iteration=MAX_NONFINITE_IN_A_ROW, nonfinite_in_a_row=MAX_NONFINITE_IN_A_ROW)


def test_fp16_overflow_halves_the_scale_and_is_no_incident_of_the_data() -> None:
    rig = Rig(poison=2, value=3e18, scale=True).fit(4)  # a loss of 1e36: finite until it is scaled
    assert [event["kind"] for event in rig.of_type("incident")] == ["fp16-overflow"]
    assert float(rig.optimizer.loss_scale) == 2.0**15


def test_a_stop_finishes_the_step_and_the_rest_gives_the_same_bytes() -> None:
    straight = Rig().fit(10)
    stopped = Rig(stop_after=4)
    assert stopped.fit(10).finished is False and stopped.trainer.position.updates == 4
    resumed = Rig()
    with torch.no_grad():
        for name, parameter in resumed.parameters.items():
            parameter.copy_(stopped.weights()[name])
    resumed.optimizer.load(stopped.optimizer.state())
    resumed.trainer.position = stopped.trainer.position
    assert same(resumed.fit(10), straight)


def test_hooks_act_on_confirmed_state_only() -> None:
    seen: list[tuple[int, dict[str, Tensor]]] = []

    class Watch:
        def due(self, updates: int) -> bool:
            return updates % 3 == 0

        def act(self, trainer: Trainer) -> None:
            seen.append((trainer.position.updates, rig.weights()))

    rig = Rig(hooks=[Watch()], copy=Corruptor({5}, ("unpinned",)))
    rig.fit(7)
    assert [updates for updates, _ in seen] == [3, 6]
    for updates, weights in seen:
        reference = Rig().fit(updates).weights()
        assert all(torch.equal(weights[name], reference[name]) for name in weights)


def test_a_lost_verdict_is_read_again_and_never_believed() -> None:
    rig = Rig()
    work = rig.trainer._work(rig.trainer.open_batches(0))
    assert work is not None
    pending = rig.trainer._update(work)
    pending.on_host = torch.zeros_like(pending.on_host)
    assert pending.verdict()[0] == 1
    pending.on_device = torch.zeros_like(pending.on_host)
    with pytest.raises(TransferError, match="update"):
        pending.verdict()
