"""Thousands of faults in trained state: no update may use it, and no update without a fault may be refused.

usage: python benchmarks/reliability.py state [--faulty 10000] [--clean 100000] [--device cuda] [--captured]

Between two updates of the product's optimizer, one tensor of its state (a weight, a moment, an average, a step count)
is spoilt like a faulty copy (``faults.KINDS``). ``--captured``: by the guard's graphs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.faults import KINDS, Scene, bytes_of, fitted, spoil
from benchmarks.faulty_training import small_optimizer
from lora_rocm.checks.graph_check import capture_on_gpu
from lora_rocm.optim.base import GatedOptimizer

STATE_KINDS = tuple(kind for kind in KINDS if kind != "swapped_samples")  # there are no samples here
CLEAN_IN_A_ROW = 100  # updates between two reads of the verdict, which stays set


@dataclass
class Found:
    """Outcomes of the faults, counted by kind."""

    caught: Counter[str] = field(default_factory=Counter)  # named, and nothing moved
    trained: Counter[str] = field(default_factory=Counter)
    unchanged: Counter[str] = field(default_factory=Counter)  # faults that changed nothing, so no faults
    false_alarms: int = 0
    seconds: float = 0.0


def carried(optimizer: GatedOptimizer) -> dict[str, Tensor]:
    """Return all live tensors that carry over from one update to the next."""
    weights = {f"weight {name}": tensor for name, tensor in optimizer.parameters.items()}
    return weights | {f"average {name}": tensor for name, tensor in optimizer.ema.items()} | optimizer.state()


def moved_by_updates(optimizer: GatedOptimizer) -> Tensor:
    """Return weights and moments as bytes on the CPU.

    Step counts are excluded, because a held update may round a spoilt one, too.
    """
    moments = [tensor for name, tensor in optimizer.state().items() if name.endswith(tuple(optimizer.rule.buffers))]
    tensors = [*optimizer.parameters.values(), *moments]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().view(torch.int32)


def update(optimizer: GatedOptimizer, rng: torch.Generator) -> Tensor:
    """Make one update as the loop does; return the guard's verdict."""
    for leaf in optimizer.weights.leaves.values():
        leaf.grad = torch.randn(leaf.shape, generator=rng).to(leaf.device)
    optimizer.weights.gather()
    verdict = optimizer.state_guard.check()
    optimizer.step(1, verdict)
    return verdict


@torch.no_grad()
def spoilt(optimizer: GatedOptimizer, number: int, seed: int, before: dict[str, Tensor]) -> tuple[str, Tensor, Tensor]:
    """Spoil a tensor; return (kind, the tensor, its earlier value)."""
    rng = random.Random(f"{seed} {number}")
    tensors, kind = carried(optimizer), STATE_KINDS[number % len(STATE_KINDS)]
    name, other = rng.sample(sorted(tensors), 2)
    tensor = tensors[name]
    right = tensor.detach().cpu().clone()
    row = right.shape[-1] * 4 if right.ndim else 4
    others = bytes_of(tensors[other].detach().cpu())
    scene = Scene(
        fitted(bytes_of(before[name]), right.nbytes), fitted(others, right.nbytes), 4, row, 1, (0, 0), number, rng
    )
    tensor.copy_(spoil(right, kind, scene))
    return kind, tensor, right


def faulty_updates(wanted: int, device: torch.device, seed: int, captured: bool = False) -> Found:
    """Inject ``wanted`` faults, each between two updates; the run continues from the correct state after each."""
    found, rng, started = Found(), torch.Generator().manual_seed(seed), time.perf_counter()
    _, optimizer = small_optimizer(device)
    optimizer.state_guard.use_graphs(capture_on_gpu if captured else None)
    for number in range(wanted):
        before = {name: tensor.detach().cpu().clone() for name, tensor in carried(optimizer).items()}
        found.false_alarms += bool(update(optimizer, rng))
        kind, tensor, right = spoilt(optimizer, number, seed, before)
        as_spoilt = moved_by_updates(optimizer)
        if torch.equal(bytes_of(tensor.detach().cpu()), bytes_of(right)):
            found.unchanged[kind] += 1
            continue
        refused = bool(update(optimizer, rng)) and optimizer.state_guard.failure(number) is not None
        held = torch.equal(moved_by_updates(optimizer), as_spoilt)
        (found.caught if refused and held else found.trained)[kind] += 1
        with torch.no_grad():
            tensor.copy_(right)
        optimizer.load({name: each.clone() for name, each in optimizer.state().items()}, dict(optimizer.ema))
    found.seconds = time.perf_counter() - started
    return found


def clean_updates(wanted: int, device: torch.device, seed: int, captured: bool = False) -> Found:
    """Make updates without a fault, every tenth with a NaN gradient, so that it is skipped."""
    found, rng, started = Found(), torch.Generator().manual_seed(seed), time.perf_counter()
    _, optimizer = small_optimizer(device)
    optimizer.state_guard.use_graphs(capture_on_gpu if captured else None)
    for number in range(1, wanted + 1):
        if number % 10 == 0:
            optimizer.weights.gradients[0] = float("nan")
        verdict = update(optimizer, rng)
        if number % CLEAN_IN_A_ROW == 0 or number == wanted:
            found.false_alarms += bool(verdict)
            optimizer.state_guard.reset()
    found.seconds = time.perf_counter() - started
    return found


def main(argv: list[str]) -> int:
    """Run both series; return 0 if every fault was caught and there was no false alarm."""
    parser = argparse.ArgumentParser(prog="reliability.py state", description=__doc__.splitlines()[0])
    parser.add_argument("--faulty", type=int, default=10_000)
    parser.add_argument("--clean", type=int, default=100_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    how = (torch.device(options.device), options.seed, options.captured)
    faulty, clean = faulty_updates(options.faulty, *how), clean_updates(options.clean, *how)
    print(f"faults in trained state, {options.device}{', captured' if options.captured else ''}")
    for kind in STATE_KINDS:
        print(f"  {kind:16}{faulty.caught[kind]:8} caught{faulty.trained[kind]:4} not")
    print(
        f"  {sum(faulty.caught.values())} caught, {sum(faulty.trained.values())} trained on, "
        f"{sum(faulty.unchanged.values())} that changed nothing; {faulty.seconds:.0f} s"
    )
    alarms = faulty.false_alarms + clean.false_alarms
    print(f"  {options.clean} updates without a fault: {clean.false_alarms} false alarms; {clean.seconds:.0f} s")
    return 0 if not alarms and not faulty.trained and faulty.caught else 1
