"""Training on batches of realistic tensors, each with a fault in its transfer to the device.

The loop, the transfer check and the gated optimizer are the product's. After each event parameters and moments are
compared bit by bit with a fault-free trainer.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.faults import Fault, FaultyBus
from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.transfer import Clock, DeviceTransfer, copy_to_device, fingerprint
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.objectives.base import Draws, Prediction
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from lora_rocm.loader.batch import Batch
from lora_rocm.memory.oom_recovery import Relief
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.recipe.optim_sections import AdamwSection
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.engine import Engine
from lora_rocm.train.loop import Trainer

SIZES = ((8, 8), (16, 12), (32, 32), (64, 48), (128, 128))
SHARES = (50, 25, 15, 7, 3)  # frequency of each size, in percent
NAMES = (
    "latent_mean", "latent_std", "prompt_embeds", "pooled_embeds", "input_ids", "time_ids", "mask", "weight",
    "timesteps", "posterior", "noise",
)  # fmt: skip
FEATURES = 3  # features per tensor of a sample
CHUNK = 250  # updates per turn of the fault-free trainer


def make_batch(seed: int, iteration: int, size: tuple[int, int] | None = None, samples: int = 0) -> dict[str, Tensor]:
    """Return CPU tensors as caches and families have them: mixed dtypes and sizes, odd byte counts, some all zero."""
    rng = random.Random(f"{seed} {iteration}")
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    height, width = size or rng.choices(SIZES, SHARES)[0]
    count = samples or rng.choice((1, 2, 3, 4))

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=generator)

    def whole(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, high, (count, *shape), generator=generator, dtype=dtype)

    tensors = {
        "latent_mean": normal(4, height, width),
        "latent_std": normal(4, height, width).abs(),
        "time_ids": whole(1536, 6),
        "weight": torch.full((count,), 1.0 / count),
    }
    if size is not None or rng.random() < 0.7:
        tensors["prompt_embeds"] = normal(77, 8)
        tensors["pooled_embeds"] = normal(31).to(torch.bfloat16)
    if size is not None or rng.random() < 0.5:
        tensors["input_ids"] = whole(49408, 77)
        tensors["mask"] = whole(2, 1, 7, 9, dtype=torch.uint8)
    if size is None and rng.random() < 0.1 and "prompt_embeds" in tensors:
        tensors["prompt_embeds"] = torch.zeros_like(tensors["prompt_embeds"])  # as for the empty caption
    return tensors


@lru_cache
def basis(count: int, device: torch.device) -> Tensor:
    """Return weights [count, FEATURES] that make the result depend on the position of each number in a tensor."""
    places = torch.arange(1, count + 1, dtype=torch.float64)[:, None]
    return (torch.sin(places * torch.tensor([1.0, 0.37, 0.011])) / count**0.5).to(device, torch.float32)


class Mixture:
    """A miniature family and its objective: predicts the noise's features from all other tensors of the batch."""

    @property
    def objective(self) -> Mixture:
        return self

    def draw(self, batch: dict[str, Tensor], seeds: list[int]) -> Draws:
        shape = batch["latent_mean"].shape[1:]
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        times_B = torch.stack([torch.randint(0, 1000, (), generator=rng) for rng in rngs])
        drawn = {name: torch.stack([torch.randn(shape, generator=rng) for rng in rngs]) for name in NAMES[-2:]}
        return Draws({"timesteps": times_B, **drawn})

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
        tensors = {**batch, **draws}
        parts = []
        for name in NAMES:
            if name not in tensors:
                parts.append(torch.zeros(len(batch["weight"]), FEATURES, device=model.device))
                continue
            flat_BN = tensors[name].flatten(1) if tensors[name].ndim > 1 else tensors[name][:, None]
            parts.append(flat_BN.to(torch.float32) @ basis(flat_BN.shape[1], model.device))
        predicted_BF = model.components["net"](torch.cat(parts[:-1], 1).clamp(-1e4, 1e4))
        return Prediction(predicted_BF, parts[-1], predicted_BF.new_ones(len(predicted_BF)))


class WatchedTransfer(DeviceTransfer):
    """Reports each send to the bus, and resets the escalation ladder after each failure.

    Otherwise a series of faults would exhaust the ladder.
    """

    before_send: Callable[[Mapping[str, Tensor]], None] = staticmethod(lambda tensors: None)

    def send(
        self, tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Clock]:
        self.before_send(tensors)
        return super().send(tensors, fingerprints)

    def failed(self, what: str) -> None:
        super().failed(what)
        self._failures_at_base = 0


class UncheckedTransfer(WatchedTransfer):
    """The same without the check, to show the effect of the faults."""

    def compare(self, arrived: Iterable[Tensor], expected_KB: Tensor, salt: int | Tensor) -> None:
        pass


def small_optimizer(device: torch.device, ema_decay: float = 0.9) -> tuple[nn.Module, GatedOptimizer]:
    """Return a small model, always the same, and the product's optimizer for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(FEATURES * (len(NAMES) - 1), 8), nn.Tanh(), nn.Linear(8, FEATURES)).to(device)
    parameters = dict(net.named_parameters())
    groups = [{"names": list(parameters), "lr": 1e-2}]
    how = {"max_train_steps": 10**9, "ema_decay": ema_decay, "use_loss_scale": False}
    return net, GatedOptimizer(FlatWeights(parameters), groups, AdamwSection(lr_scheduler="constant"), **how)


def state_of(optimizer: GatedOptimizer) -> Tensor:
    """Return all tensors that a step changes, as bytes on the CPU: parameters, average, moments, step counts."""
    tensors = [*optimizer.parameters.values(), *optimizer.ema.values(), *optimizer.state().values()]
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors]).cpu().view(torch.int32)


class Run:
    """A trainer on such batches, with or without a faulty bus."""

    def __init__(self, device: torch.device, seed: int, kind: type[WatchedTransfer], bus: FaultyBus | None) -> None:
        self.seed, self.bus, self.iteration = seed, bus, 0
        self.told: Callable[[str, dict[str, Any]], None] = lambda event_type, fields: None
        self.stop = False
        net, self.optimizer = small_optimizer(device)
        model = LoadedModel({"net": net}, torch.float32, device)
        family: Any = Mixture()
        self.transfer = kind(device, pin=device.type == "cuda", copy=bus or copy_to_device)
        context = RunContext(self._emit, should_stop=lambda: self.stop)
        self.trainer = Trainer(
            family=family,
            model=model,
            engine=Engine(family, model, self.optimizer.weights, self.optimizer.loss_scale, nullcontext),
            optimizer=self.optimizer,
            transfer=self.transfer,
            open_batches=self._batches,
            seed=seed,
            dropout=DropoutDraws([]),
            position=Position(),
            relief=Relief(family, model, 1, 1, True, context),
            context=context,
        )

    def _emit(self, event: Event) -> None:
        self.told(event.type, event.to_json())

    def _batches(self, first: int) -> Iterator[Batch]:
        iteration = first
        while True:
            self.iteration = iteration
            tensors = make_batch(self.seed, iteration)
            count = len(tensors["weight"])
            yield Batch(
                tensors=tensors,
                fingerprints={name: fingerprint(tensor) for name, tensor in tensors.items()},
                sample_keys=tuple(f"{iteration}-{row}" for row in range(count)),
                positions=tuple(range(count)),
                shares=(1,) * count,
                shape=SampleShape.of(tokens=1),
                iteration=iteration,
                micro=0,
                is_last=True,
            )
            iteration += 1


@dataclass
class Found:
    """Outcomes of the faults, counted by (kind, target)."""

    caught: Counter[tuple[str, str]] = field(default_factory=Counter)
    reached: Counter[tuple[str, str]] = field(default_factory=Counter)
    unchanged: Counter[tuple[str, str]] = field(default_factory=Counter)  # faults that changed nothing, so no faults
    compared: int = 0  # states compared with the fault-free run
    differing: list[int] = field(default_factory=list)  # updates after which the states differed
    false_alarms: int = 0
    seconds: float = 0.0

    def add(self, other: Found) -> None:
        """Add the counts of another series."""
        for name in COUNTS:
            getattr(self, name).update(getattr(other, name))
        self.compared += other.compared
        self.differing += other.differing
        self.false_alarms += other.false_alarms
        self.seconds += other.seconds

    @property
    def faults(self) -> int:
        return sum(self.caught.values()) + sum(self.reached.values())


COUNTS = ("caught", "reached", "unchanged")


class Judge:
    """Reads the events of a run with faults, and compares its state after each with a fault-free run."""

    def __init__(
        self, run: Run, bus: FaultyBus, clean_states: dict[int, Tensor], found: Found, choice: Mapping[str, Any]
    ) -> None:
        self.run, self.bus, self.states, self.found, self.choice = run, bus, clean_states, found, choice
        self.drawn: dict[int, Fault] = {}
        self.refused = -1
        run.told = self.event
        run.transfer.before_send = self.before_send  # type: ignore[method-assign]

    def before_send(self, tensors: Mapping[str, Tensor]) -> None:
        """Draw a fault for each batch; send it without the fault after it was refused."""
        iteration = self.run.iteration
        if iteration != self.refused:
            self.drawn[iteration] = Fault.drawn(iteration, self.run.seed, tensors, **self.choice)
        self.bus.begin(tensors, None if iteration == self.refused else self.drawn[iteration])

    def event(self, event_type: str, fields: dict[str, Any]) -> None:
        updates = fields["updates"] if event_type == "step" else self.run.trainer.position.updates
        self.found.compared += 1
        if not torch.equal(state_of(self.run.optimizer), self.states[updates]):
            self.found.differing.append(updates)
        iteration = fields["iteration"]
        fault = self.drawn[iteration]
        name = (fault.kind, fault.target)
        if event_type == "incident":
            if fields["kind"] == "transfer" and fault.changed:
                self.found.caught[name] += 1
            else:
                self.found.false_alarms += 1
            self.refused = iteration
        elif iteration != self.refused:  # a step on the first transfer
            (self.found.reached if fault.changed else self.found.unchanged)[name] += 1
        if event_type == "step":
            self.drawn.pop(iteration)


def faulty_steps(
    wanted: int, device: torch.device, seed: int, kind: type[WatchedTransfer] = WatchedTransfer, **choice: Any
) -> Found:
    """Train until ``wanted`` faults have occurred, or one did harm.

    Args:
        wanted: number of faults.
        device: device to train on.
        seed: seed of batches and faults.
        kind: transfer class of the run with faults.
        choice: ``kinds`` and ``targets`` of the faults, unless all.
    """
    found, states = Found(), dict[int, Tensor]()
    clean, bus = Run(device, seed, WatchedTransfer, None), FaultyBus()
    faulty = Run(device, seed, kind, bus)

    def keep(event_type: str, fields: dict[str, Any]) -> None:
        found.false_alarms += event_type == "incident"
        states[clean.trainer.position.updates] = state_of(clean.optimizer)

    clean.told = keep
    Judge(faulty, bus, states, found, choice)
    started = time.perf_counter()
    states[0] = state_of(clean.optimizer)
    while found.faults < wanted and not found.differing:
        target = clean.trainer.position.updates + min(CHUNK, wanted - found.faults)
        clean.trainer.fit(target)
        faulty.trainer.fit(target)
        for updates in [key for key in states if key < target]:
            del states[updates]
    found.seconds = time.perf_counter() - started
    return found
