"""Cost of the guard and the canary: steps with and without them, alternating in one process.

usage: python benchmarks/reliability.py price ROOT [--pairs 10] [--steps 10] [--toy] [--json FILE]
       [--rank 16] [--targets attention] [--ema 0] [--plain]

A random SDXL of full size (nothing to download), batch 1, 1024 px. Blocks of steps with the transfer check and without
it alternate; likewise for the guard of trained state. The output is

- the wall time of a step with and without, and the spread over the pairs of blocks: a drifting host hides a small
  difference;
- the host's time in the guard's own code, and its kernels' time (from a profiler's trace). The GPU cannot idle because
  of the guard for longer than the host is busy with it: a bound that does not drift. If steps are captured, the host
  does that work while the GPU is busy, and the difference in wall time (upper quartile of the pairs) is the lower
  bound;
- the canary: the seconds of a check, and the seconds without a kernel, as a share of the steps between two checks;
- the guard of trained state ("state"): the same differences in wall time. Also its time per step when it runs alone, in
  wall time (with gaps between its launches) and in kernels. Also its read bandwidth, as a share of the device's peak
  bandwidth: the faster of a sum over 1 GiB and its copy.

The promises: the GPU idles for at most 0.5 % longer, judged by that bound. The guard of trained state adds at most 0.3
% to a step at rank 16 on ``attention`` without EMA, by the upper quartile of the pairs with and without it. Its kernels
read with at least 80 % of that bandwidth. Alone it takes longer, because within a step it fills gaps. ``--plain``
measures the implementations in plain PyTorch, which do not promise the latter two. ``--toy`` rehearses on the CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.hardware.settings import Settings
from lora_rocm.optim.state_guard import StateGuard
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.load import dump_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import Event, StepEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import build_trainer, loop, pipeline
from lora_rocm.train.context import StartContext
from lora_rocm.train.guard import Guard
from lora_rocm.train.session import Session

WARM_UP_STEPS = 8
PROFILED_PAIRS, PROFILED_STEPS = 3, 5
LOOKS = 12
ALONE_TURNS, ALONE_REPEATS = 5, 40
PROMISED_PERCENT, PROMISED_STATE_PERCENT, PROMISED_BANDWIDTH_PERCENT = 0.5, 0.3, 80.0
MODELS = {True: "builtin:tiny-sdxl", False: "random:stabilityai/stable-diffusion-xl-base-1.0"}
KERNELS = {"kernel"}  # categories of a trace; copies are not kernels: the GPU counts as idle during them


class UncheckedTransfer(DeviceTransfer):
    """Copies without comparing."""

    def compare(self, arrived: Iterable[Tensor], expected_KB: Tensor, salt: int | Tensor) -> None:
        pass

    def send(self, tensors: Mapping[str, Tensor], fingerprints: Mapping[str, Tensor]) -> Any:
        start = self._mark()
        arrived = {name: self._copy(tensor.contiguous(), self.device, self.method) for name, tensor in tensors.items()}
        return arrived, loop.Clock([start, self._mark(), self._mark()])


class UncheckedState:
    """Replaces the guard of trained state, and checks nothing."""

    def __init__(self, guard: StateGuard) -> None:
        self.changed, self.held = guard.changed, guard.held

    def check(self) -> Tensor:
        return self.changed

    def renew(self) -> None:
        pass


class MeasuredError(Exception):
    """Ends the run after the measurement."""


@dataclass
class Block:
    """A number of steps with or without a guard."""

    guarded: bool
    steps: int
    step_ms: float
    check_ms: float  # per step, between device events: gaps included
    host_ms: float = 0.0  # of the median step, in sending and fingerprints
    idle_ms: float | None = None  # per step: no kernel runs
    busy_ms: float | None = None  # per step: kernels run


@dataclass
class Look:
    """One check of the canary."""

    seconds: float
    busy_s: float | None = None  # kernels run


@dataclass
class State:
    """The guard of trained state alone, per step. bytes_read: bytes that it reads."""

    bytes_read: int = 0
    seconds: float = 0.0
    busy_s: float | None = None  # kernels run
    device_bytes_per_s: float = 1.0


@dataclass
class Figures:
    """All measurements.

    Blocks, profiled: with and without the transfer check; of_state: for the guard of trained state.
    """

    blocks: list[Block] = field(default_factory=list)
    profiled: list[Block] = field(default_factory=list)
    of_state: list[Block] = field(default_factory=list)
    state: State = field(default_factory=State)
    looks: list[Look] = field(default_factory=list)
    profiled_looks: list[Look] = field(default_factory=list)
    every: int = 0  # steps between two checks


def idle_and_busy_us(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return microseconds within the span of all (begin, end) intervals covered by (none, at least one)."""
    ordered = sorted(intervals)
    if not ordered:
        return 0.0, 0.0
    busy, (begin, end) = 0.0, ordered[0]
    first = begin
    for its_begin, its_end in ordered[1:]:
        if its_begin > end:
            busy += end - begin
            begin, end = its_begin, its_end
        end = max(end, its_end)
    busy += end - begin
    return end - first - busy, busy


def kernels_of(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (begin, end) in microseconds of the kernels in a trace in Chrome's format."""
    return [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") in KERNELS and "dur" in event
    ]


def profiled(work: Callable[[], object]) -> tuple[float, float] | None:
    """Return (idle, busy) seconds of the GPU from the first to the last kernel of some work; None without a GPU."""
    if not torch.cuda.is_available():
        work()
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = kernels_of(json.loads(path.read_text(encoding="utf-8")))
    if not kernels:
        raise RuntimeError("the profiler saw no kernel, so the idle time is unknown")
    idle_us, busy_us = idle_and_busy_us(kernels)
    return idle_us / 1e6, busy_us / 1e6


@contextmanager
def without_guard(trainer: loop.Trainer) -> Iterator[None]:
    """Disable the check on the device, and the fingerprints of the draws on the host."""
    checked, fingerprint = trainer.transfer, loop.fingerprint
    trainer.transfer = UncheckedTransfer(checked.device, pin="pinned" in checked.methods)
    loop.fingerprint = lambda tensor_B: torch.zeros(len(tensor_B), dtype=torch.int64)  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer.transfer, loop.fingerprint = checked, fingerprint


@contextmanager
def without_state_guard(trainer: loop.Trainer) -> Iterator[None]:
    """Disable the fingerprints of trained state."""
    guard = trainer.optimizer.state_guard
    trainer.optimizer.state_guard = UncheckedState(guard)  # type: ignore[assignment]
    try:
        yield
    finally:
        trainer.optimizer.state_guard = guard
        guard.reset()


WITHOUT = {"batches": without_guard, "state": without_state_guard}


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds per call, in the fastest of several turns of ``repeats`` calls."""
    turns_s = []
    for _ in range(ALONE_TURNS + 1):  # the first warms up
        synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        turns_s.append((time.perf_counter() - started) / repeats)
    return min(turns_s[1:])


def device_bytes_per_s(device: torch.device) -> float:
    """Return the device's peak bandwidth, by reading or by reading and writing."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    read = source.nbytes / seconds_of(source.sum, 10)
    return max(read, 2 * source.nbytes / seconds_of(lambda: target.copy_(source), 10))


def state_alone(guard: StateGuard) -> State:
    """Return the time per step of the guard of trained state when nothing else runs."""

    def once() -> None:
        guard.check()
        guard.renew()

    seconds = seconds_of(once, ALONE_REPEATS if torch.cuda.is_available() else 1)
    found = profiled(lambda: [once() for _ in range(ALONE_REPEATS)]) if torch.cuda.is_available() else None
    busy_s = found[1] / ALONE_REPEATS if found else None
    assert guard.failure(0) is None
    return State(2 * guard.bytes_read, seconds, busy_s, device_bytes_per_s(guard.changed.device))


class Measured(loop.Trainer):
    """The product's trainer, with ``fit`` measuring instead of training."""

    figures = Figures()
    pairs, steps = 5, 20

    def fit(self, max_train_steps: int) -> bool:
        guard: Guard = self.hooks[0].action.__self__  # type: ignore[attr-defined]
        canary, figures = guard.canary, self.figures
        figures.every = self.hooks[0].steps  # type: ignore[attr-defined]
        self.hooks = ()
        for guarded in (True, False):
            self._block(guarded, WARM_UP_STEPS)
        for _ in range(self.pairs):
            figures.blocks += [self._block(guarded, self.steps) for guarded in (True, False)]
            figures.of_state += [self._block(guarded, self.steps, "state") for guarded in (True, False)]
        figures.state = state_alone(self.optimizer.state_guard)
        for _ in range(PROFILED_PAIRS if torch.cuda.is_available() else 0):
            figures.profiled += [self._profiled_block(guarded, PROFILED_STEPS) for guarded in (True, False)]
        for number in range(2 * LOOKS):
            started, busy_s = time.perf_counter(), None
            if number < LOOKS:
                failure = canary.failure()
            else:
                failures: list[Any] = []
                found = profiled(lambda: failures.append(canary.failure()))  # noqa: B023
                failure, busy_s = failures[0], found[1] if found else None
            assert failure is None, failure
            look = Look(time.perf_counter() - started, busy_s)
            (figures.looks if number < LOOKS else figures.profiled_looks).append(look)
        raise MeasuredError

    def _block(self, guarded: bool, steps: int, guard: str = "batches") -> Block:
        checks: list[float] = []
        spent_s = [0.0]
        context = self.context

        def noted(event: Event) -> None:
            if isinstance(event, StepEvent):
                checks.append(event.check_s)
                spent_s.append(0.0)
            context.emit(event)

        self.context = replace(context, emit=noted)
        try:
            synchronize()
            started = time.perf_counter()
            with nullcontext() if guarded else WITHOUT[guard](self):
                self._steps(steps, spent_s)
            synchronize()
            step_ms = 1e3 * (time.perf_counter() - started) / steps
        finally:
            self.context = context
        host_ms = 1e3 * statistics.median(spent_s[:-1])
        return Block(guarded, steps, step_ms, 1e3 * statistics.mean(checks), host_ms)

    def _steps(self, steps: int, spent_s: list[float]) -> None:
        with watched(self, spent_s):
            super().fit(self.position.updates + steps)

    def _profiled_block(self, guarded: bool, steps: int) -> Block:
        blocks: list[Block] = []
        found = profiled(lambda: blocks.append(self._block(guarded, steps)))
        if found is not None:
            blocks[0].idle_ms, blocks[0].busy_ms = (1e3 * seconds / steps for seconds in found)
        return blocks[0]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def watched(trainer: loop.Trainer, spent_s: list[float]) -> Iterator[None]:
    """Add the host's time for sending a batch and for fingerprints of draws to the last of ``spent_s``."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent_s[-1] += time.perf_counter() - started

        return wrapped

    transfer, fingerprint = trainer.transfer, loop.fingerprint
    transfer.send, loop.fingerprint = timed(transfer.send), timed(fingerprint)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del transfer.send  # type: ignore[attr-defined]
        loop.fingerprint = fingerprint


def quartiles(blocks: list[Block], name: str) -> tuple[float, float, float]:
    """Return quartiles of the differences of pairs: (lower, median, upper)."""
    differences = sorted(
        getattr(on, name) - getattr(off, name) for on, off in zip(blocks[::2], blocks[1::2], strict=True)
    )
    quarter = len(differences) // 4
    return differences[quarter], statistics.median(differences), differences[-1 - quarter]


def median(blocks: Iterable[Block], name: str, guarded: bool) -> float:
    """Return the median over the blocks with or without the guard."""
    return statistics.median(getattr(block, name) for block in blocks if block.guarded == guarded)


def summary(figures: Figures) -> dict[str, Any]:
    """Return the printed figures. Differences are medians of pairs, so that clock drift cancels out."""

    def added(blocks: list[Block], name: str) -> float:
        return quartiles(blocks, name)[1]

    step_ms = median(figures.blocks, "step_ms", False)
    look_s = statistics.median(look.seconds for look in figures.looks)
    low, _, high = quartiles(figures.blocks, "step_ms")
    found: dict[str, Any] = {
        "step_ms_off": step_ms,
        "step_ms_on": median(figures.blocks, "step_ms", True),
        "guard_added_wall_percent": 100 * added(figures.blocks, "step_ms") / step_ms,
        "guard_added_wall_from_percent": 100 * low / step_ms,
        "guard_added_wall_to_percent": 100 * high / step_ms,
        "guard_host_ms": added(figures.blocks, "host_ms"),
        "check_ms_between_events": median(figures.blocks, "check_ms", True),
        "canary_look_s": look_s,
        "canary_every_n_steps": figures.every,
        "canary_wall_percent": 1e5 * look_s / (figures.every * step_ms),
    }
    if figures.profiled:
        idle_ms = added(figures.profiled, "idle_ms")
        # the GPU does nothing else during a check, so all time without one of its kernels is idle time
        look_idle_s = max(0.0, look_s - statistics.median(look.busy_s or 0.0 for look in figures.profiled_looks))
        found |= {
            "idle_ms_off": median(figures.profiled, "idle_ms", False),
            "idle_ms_on": median(figures.profiled, "idle_ms", True),
            "guard_kernels_ms": added(figures.profiled, "busy_ms"),
            "guard_added_idle_percent": 100 * idle_ms / step_ms,
            "canary_look_idle_s": look_idle_s,
            "canary_added_idle_percent": 1e5 * look_idle_s / (figures.every * step_ms),
        }
        host_percent, kernels_percent = (100 * found[f"guard_{part}_ms"] / step_ms for part in ("host", "kernels"))
        # the GPU is not idle during the guard's own kernels
        by_wall = max(0.0, found["guard_added_wall_to_percent"] - kernels_percent)
        found["idle_at_most_percent"] = min(host_percent, by_wall) + found["canary_added_idle_percent"]
        found["time_at_most_percent"] = host_percent + kernels_percent + found["canary_wall_percent"]
    return found


def summary_of_state(figures: Figures) -> dict[str, Any]:
    """Return the same figures for the guard of trained state."""
    step_ms, state = median(figures.of_state, "step_ms", False), figures.state
    low, middle, high = (100 * part / step_ms for part in quartiles(figures.of_state, "step_ms"))
    rate = state.bytes_read / (state.busy_s or state.seconds)
    return {
        "state_step_ms_off": step_ms,
        "state_step_ms_on": median(figures.of_state, "step_ms", True),
        "state_added_wall_percent": middle,
        "state_added_wall_from_percent": low,
        "state_added_wall_to_percent": high,
        "state_mb_read": state.bytes_read / 1e6,
        "state_alone_ms": 1e3 * state.seconds,
        "state_alone_percent": 1e5 * state.seconds / step_ms,
        "state_kernels_ms": 1e3 * state.busy_s if state.busy_s else None,
        "state_gb_per_s": rate / 1e9,
        "device_gb_per_s": state.device_bytes_per_s / 1e9,
        "state_bandwidth_percent": 100 * rate / state.device_bytes_per_s,
    }


def kept(found: Mapping[str, Any], recipe: Recipe, plain: bool) -> dict[str, bool]:
    """Return whether these figures keep each promise."""
    is_smallest = recipe.lora.rank == 16 and recipe.lora.targets == "attention" and not recipe.train.ema_decay
    judged = {"idle": found["idle_at_most_percent"] <= PROMISED_PERCENT}
    if not plain:
        judged["state, bandwidth"] = found["state_bandwidth_percent"] >= PROMISED_BANDWIDTH_PERCENT
    if not plain and is_smallest:
        judged["state, share of a step"] = found["state_added_wall_to_percent"] <= PROMISED_STATE_PERCENT
    return judged


def recipe_of(root: Path, options: argparse.Namespace) -> Recipe:
    """Return a recipe with batch 1 and one bucket, so that all steps are alike."""
    toy = options.toy
    side_px = 64 if toy else 1024
    images = root / "images of one size"
    images.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(7)
    for number in range(4):
        coarse = Image.fromarray(generator.integers(0, 255, (12, 12, 3), dtype=np.uint8))
        coarse.resize((side_px, side_px), Image.Resampling.BICUBIC).save(images / f"{number}.png")
    return recipe_from(
        {
            "model": {"name_or_path": MODELS[toy]},
            "data": {"path": str(images), "resolution": side_px, "bucket_step": 32},
            "lora": {"rank": options.rank, "targets": options.targets},
            "train": {
                "max_train_steps": 10**6,
                "batch_size": 1,
                "mixed_precision": "no" if toy else "bf16",
                "ema_decay": options.ema,
            },
            "cache": {"dir": str(root / "cache")},
        }
    )


def main(argv: list[str]) -> int:
    """Measure and print; return 0 if the promises are kept, or if there is no GPU to judge them."""
    parser = argparse.ArgumentParser(prog="reliability.py price", description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="attention")
    parser.add_argument("--ema", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args(argv)
    options.root.mkdir(parents=True, exist_ok=True)
    # recipe and device
    recipe, settings = recipe_of(options.root, options), Settings(triton=not options.plain)
    device = choose_device("cpu" if options.toy else "auto", settings)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings)
    apply(settings, device)
    run_dir = options.root / "price-run"
    shutil.rmtree(run_dir, ignore_errors=True)
    directory = RunDir(run_dir).create()
    directory.recipe.write_text(dump_recipe(recipe), encoding="utf-8")
    # a real run, with a trainer that measures
    Measured.figures, Measured.pairs, Measured.steps = Figures(), options.pairs, options.steps
    session, original = Session(directory, watch_parent=False), build_trainer.Trainer
    build_trainer.Trainer = Measured  # type: ignore[misc]
    try:
        pipeline.train(StartContext(session, recipe, device, dtype, settings))
    except MeasuredError:
        pass
    finally:
        build_trainer.Trainer = original  # type: ignore[misc]
        session.close()
    # print the figures, and judge the promises
    found = {**summary(Measured.figures), **summary_of_state(Measured.figures)}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.pairs} pairs of blocks of {options.steps} steps")
    for what, value in found.items():
        print(f"  {what:29} {'-' if value is None else f'{value:.4f}':>12}")
    if options.json:
        options.json.write_text(json.dumps({"device": name, **found}, indent=1), encoding="utf-8")
    if "idle_at_most_percent" not in found:
        print("  no GPU: nothing is said of idle time", file=sys.stderr)
        return 0
    judged = kept(found, recipe, options.plain)
    print("  " + "; ".join(f"{promise}: {'kept' if holds else 'NOT KEPT'}" for promise, holds in judged.items()))
    return 0 if all(judged.values()) else 1
