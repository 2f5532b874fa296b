"""A whole training step as one CUDA graph: transfer check, forward, backward, and the optimizer step that it gates.

All parts are the product's. The graph reads static input buffers, which are filled before each replay; faults are
injected there. The host reads no value between the copy and the end of the step. On a CPU the same step runs without a
graph.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.faults import Fault, FaultyBus
from benchmarks.faulty_training import NAMES, Found, Mixture, make_batch, small_optimizer, state_of
from lora_rocm.device.transfer import DeviceTransfer, fingerprint, salted
from lora_rocm.families.base import LoadedModel
from lora_rocm.families.objectives.loss import losses
from lora_rocm.train.loop import seed_for

SHAPES = (((64, 48), 3), ((16, 12), 2), ((8, 8), 4))
"""Latents' height and width, and samples. The largest comes first, because a graph keeps reading the table of position
weights that existed at its capture, and a larger tensor would make a new table.
"""
WARM_UP = 3


class StaticStep:
    """One step over static buffers, with the shapes of ``example``."""

    def __init__(self, transfer: DeviceTransfer, example: Mapping[str, Tensor]) -> None:
        device = transfer.device
        net, self.optimizer = small_optimizer(device, ema_decay=0.0)  # a graph would keep the decay of its capture
        self.transfer, self.family = transfer, Mixture()
        self.model = LoadedModel({"net": net}, torch.float32, device)
        self.inputs = {name: torch.zeros_like(tensor, device=device) for name, tensor in example.items()}
        self.expected_KB = torch.zeros(len(example), len(example["weight"]), dtype=torch.int64, device=device)
        self.salt = torch.ones((), dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def fill(self, tensors: Mapping[str, Tensor], bus: FaultyBus) -> None:
        """Copy into the static buffers, through the bus that may inject a fault. Does not synchronise."""
        salt = self.transfer.next_salt()
        for name, buffer in self.inputs.items():
            self._copy(buffer, bus.spoilt(tensors[name]))
        wanted_KB = torch.stack([fingerprint(tensors[name]) for name in self.inputs])
        self._copy(self.expected_KB, bus.spoilt(salted(wanted_KB, salt)))
        self.salt.fill_(salt)  # a kernel argument, so not copied like the data

    def _copy(self, buffer: Tensor, source: Tensor) -> None:
        pinned = source.pin_memory() if buffer.is_cuda else source
        buffer.copy_(pinned, non_blocking=True)  # the host allocator keeps the pinned tensor until the copy's event

    def step(self) -> None:
        """Run the step that is captured."""
        self.transfer.compare(self.inputs.values(), self.expected_KB, self.salt)
        loss_B = losses(self.family, self.model, self.inputs, {})  # type: ignore[arg-type]
        ((loss_B * self.inputs["weight"]).sum() * self.optimizer.loss_scale).backward()
        self.optimizer.weights.gather()
        self.optimizer.step(0, self.transfer.bad)

    def prepare(self) -> None:
        """Create lazily allocated state, capture on CUDA, and reset to the initial state."""
        parameters = list(self.optimizer.parameters.values())  # share memory with the leaves
        start = [parameter.detach().clone() for parameter in parameters]
        if self.transfer.device.type == "cuda":
            self._capture()
        else:
            self.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
            for name, tensor in self.optimizer.state().items():
                tensor.fill_(1.0 if name == "loss_scale" else 0.0)
        self.transfer.clear()

    def _capture(self) -> None:
        for group in self.optimizer.rule.kernel.param_groups:
            group["capturable"] = True
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warm-up steps of a capturable optimizer are not captured
            for _ in range(WARM_UP):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=side):
            self.step()
        torch.cuda.synchronize()

    def run(self) -> None:
        """Run one step on the present buffers, without synchronising."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()


def captured_faults(wanted: int, device: torch.device, seed: int, kind: type[DeviceTransfer] = DeviceTransfer) -> Found:
    """Like ``faulty_training.faulty_steps``, with captured steps; it continues after a harmful fault."""
    found = Found()
    started = time.perf_counter()
    for number, (size, samples) in enumerate(SHAPES):
        share = wanted // len(SHAPES) + (number < wanted % len(SHAPES))
        _faults_of_shape(share, device, seed + number, size, samples, kind, found)
    found.seconds = time.perf_counter() - started
    return found


def _faults_of_shape(
    wanted: int,
    device: torch.device,
    seed: int,
    size: tuple[int, int],
    samples: int,
    kind: type[DeviceTransfer],
    found: Found,
) -> None:
    """Before each step of the fault-free run, run the same batch with a fault, and another batch queued after it."""
    first = inputs_of(seed, 0, size, samples)
    clean, step = (StaticStep(of(device, pin=device.type == "cuda"), first) for of in (DeviceTransfer, kind))
    bus, sound = FaultyBus(), FaultyBus()
    for prepared in (clean, step):
        prepared.prepare()
    number, target = 0, found.faults + wanted
    while found.faults < target:
        tensors, fault = inputs_of(seed, number, size, samples), Fault.drawn(number, seed, first)
        number += 1
        bus.begin(tensors, fault)
        step.fill(tensors, bus)
        step.run()
        following = inputs_of(seed, number, size, samples)
        bus.begin(following, None)
        step.fill(following, bus)
        step.run()  # must not change anything either: the verdict stays set
        _record(found, fault, bool(step.transfer.bad), torch.equal(state_of(step.optimizer), state_of(clean.optimizer)))
        with torch.no_grad():  # restore them if they changed
            for tensor, value in zip(live_tensors(step), live_tensors(clean), strict=True):
                tensor.copy_(value)
        step.transfer.clear()
        for each, its_bus in ((step, bus), (clean, sound)):
            its_bus.begin(tensors, None)
            each.fill(tensors, its_bus)
            each.run()
            found.false_alarms += bool(each.transfer.bad)
        if not torch.equal(state_of(step.optimizer), state_of(clean.optimizer)):
            found.differing.append(number)


def _record(found: Found, fault: Fault, bad: bool, held: bool) -> None:
    """Record the verdict of a fault, and whether parameters and moments were held."""
    name = (fault.kind, fault.target)
    found.compared += 1
    if not fault.changed:
        found.unchanged[name] += 1
        found.false_alarms += bad
    else:
        (found.caught if bad and held else found.reached)[name] += 1


def live_tensors(step: StaticStep) -> list[Tensor]:
    """Return all tensors that a step changes."""
    return [*step.optimizer.parameters.values(), *step.optimizer.state().values()]


def inputs_of(seed: int, number: int, size: tuple[int, int], samples: int) -> dict[str, Tensor]:
    """Return a batch and its draws."""
    batch = make_batch(seed, number, size, samples)
    draws = Mixture().draw(batch, [seed_for(seed, number, row) for row in range(samples)]).tensors
    tensors = {**batch, **draws}
    return {name: tensors[name] for name in NAMES}
