"""Figures of a training step: of our own run, and of the bare loop."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.training_step.bare_loop import CAPTURED, COMPILED, EAGER, BareStep, Inputs, captured, compiling
from benchmarks.training_step.marks import LOSS, SEND, STEP, Marks
from benchmarks.training_step.op_counts import count_step, first_flops
from benchmarks.training_step.profile import summary, traced
from benchmarks.training_step.setup import Bench
from lora_rocm.device.allocator import empty_pools
from lora_rocm.families.base import family_for
from lora_rocm.recipe.schema import Recipe

MIN_WARM_UP, MAX_WARM_UP = 5, 60
EDGES = 2  # the first and the last step of a window are atypical and not counted
PARTS_STEPS, TRACED_STEPS, FLAGGED_STEPS = 5, 3, 2
MATMUL_SIDE = {"cuda": 8192, "cpu": 1024}
MATMUL_CALLS = {"cuda": 30, "cpu": 3}
EVENT_PARTS = ("loading", "copy", "check", "wait")
FLAGGED = "called a synchronizing"

Figures = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """The length of the measurement, and the folder of traces (kept only if ``profile``)."""

    steps: int
    profile: bool
    folder: Path


def matmul_rate(device: torch.device, dtype: torch.dtype) -> Figures:
    """Return the FLOP/s of a large square matrix product, after warm-up."""
    side = MATMUL_SIDE[device.type]
    one, other = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    seconds = stepped(lambda: torch.mm(one, other), MATMUL_CALLS[device.type], device, MATMUL_CALLS[device.type])
    dtype_name = str(dtype).removeprefix("torch.")
    return {"side": side, "dtype": dtype_name, "per_second": 2.0 * side**3 / statistics.fmean(seconds)}


def stepped(run: Callable[[], object], count: int, device: torch.device, warm_up: int) -> list[float]:
    """Return seconds of each of ``count`` consecutive calls, after a warm-up; on a GPU by its own clock."""
    on_gpu = device.type == "cuda"
    for _ in range(warm_up):
        run()

    def mark() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if on_gpu:
        torch.cuda.synchronize(device)
    marks = [mark()]
    for _ in range(count):
        run()
        marks.append(mark())
    if on_gpu:
        torch.cuda.synchronize(device)
    pairs = zip(marks, marks[1:], strict=False)
    return [begin.elapsed_time(end) / 1e3 if on_gpu else end - begin for begin, end in pairs]


def free() -> None:
    """Free all unreferenced memory, and reset the peak."""
    gc.collect()
    empty_pools()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def measure_ours(bench: Bench, wanted: Wanted, matmul: Figures) -> Figures:
    """Return all figures of a run before its first step.

    The peak covers all steps from the first, because a replayed graph does not allocate.
    """
    device = bench.start.device
    free()
    held = _held(device)
    flops = first_flops(bench)
    warm_up = _warm_up(bench)
    bench.make_steps(warm_up)
    events = bench.make_steps(wanted.steps + EDGES)[1:-1]
    train = bench.start.recipe.train
    figures = {
        **times([event["step_s"] for event in events], train.batch_size * train.gradient_accumulation_steps),
        **_peaks(device, held),
        "warm_up_steps": warm_up + 1,
        "flops": flops,
        "parts_s": _parts(bench),
        "profile": _profiled(lambda: bench.make_steps(TRACED_STEPS), TRACED_STEPS, device, wanted, "lora-rocm"),
    }
    if device.type == "cuda":
        figures["flagged_waits"] = flagged_waits(lambda: bench.make_steps(FLAGGED_STEPS)) / FLAGGED_STEPS
    else:
        counts = count_step(bench)[0]
        figures["counts"] = counts.to_json()
        figures["profile"]["waits"] = counts.waits
    return with_rates({**figures, **_kept(bench), "incidents": bench.incidents}, flops, matmul)


def measure_bare(
    recipe: Recipe, inputs: Inputs, dtype: torch.dtype, device: torch.device, how: str, wanted: Wanted
) -> Figures:
    """Return figures of the bare loop, without accumulation: a step is one micro-batch.

    Raises:
        RuntimeError: it cannot be captured or compiled here, or memory ran out.
    """
    free()
    with compiling(how == COMPILED):
        step = BareStep(family_for(recipe), recipe, inputs, dtype, device, how)
        free()
        held = _held(device)
        run = captured(step) if how in (CAPTURED, COMPILED) else step
        seconds = stepped(run, wanted.steps, device, MIN_WARM_UP)
        figures = {
            **times(seconds, recipe.train.batch_size),
            **_peaks(device, held),
            "warm_up_steps": MIN_WARM_UP,
            "recomputes": inputs.recomputes,
            "profile": _profiled(lambda: _times(run, TRACED_STEPS), TRACED_STEPS, device, wanted, how),
        }
        return figures | {"idle_s": idle_s(figures)}


def variants(against: str | None, device: torch.device) -> Sequence[str]:
    """Return the bare loops to measure: eager everywhere, captured on a GPU, compiled if asked for."""
    if against is None:
        return ()
    if device.type != "cuda" or against == "bare-eager":
        return (EAGER,)
    return (EAGER, CAPTURED, COMPILED) if against == "bare-compiled" else (EAGER, CAPTURED)


def times(seconds: Sequence[float], samples: int) -> Figures:
    """Return median, 95th percentile and mean of a step, and samples per second by the mean."""
    ordered = sorted(seconds)
    mean = statistics.fmean(ordered)
    return {
        "steps": len(ordered),
        "median_s": statistics.median(ordered),
        "p95_s": ordered[max(0, -(-95 * len(ordered) // 100) - 1)],
        "mean_s": mean,
        "samples": samples,
        "samples_per_s": samples / mean,
    }


def with_rates(figures: Figures, flops: int, matmul: Mapping[str, Any]) -> Figures:
    """Add the step's FLOP/s, its share of a matrix product's rate, and the device's idle time."""
    rate = flops / figures["median_s"]
    return {**figures, "flops_per_s": rate, "of_matmul": rate / matmul["per_second"], "idle_s": idle_s(figures)}


def idle_s(figures: Mapping[str, Any]) -> float | None:
    """Return the device's idle time per step without the profiler; None if the profiler did not see the device."""
    busy_s: float | None = figures["profile"]["busy_s"]
    return None if busy_s is None else max(0.0, figures["median_s"] - busy_s)


def flagged_waits(run: Callable[[], object]) -> int:
    """Return the number of synchronizing calls that PyTorch itself reports (it does not report waits for events)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(FLAGGED in str(warning.message) for warning in caught)


def _kept(bench: Bench) -> Figures:
    """Return the memory-saving measures of the steps: parts of a micro-batch, and blocks recomputed or offloaded."""
    relief, memory = bench.trainer.relief, bench.artifacts.memory
    blocks = len(bench.trainer.family.blocks(bench.trainer.model))
    recomputed, offloaded = (0, blocks * memory.offloads)
    if memory.plan is not None:
        recomputed, offloaded = len(memory.plan.recomputed), len(memory.plan.offloaded)
    return {
        "parts": relief.parts,
        "recomputes": relief.recomputes,
        "blocks": blocks,
        "recomputed_blocks": blocks if relief.recomputes else recomputed,
        "offloaded_blocks": offloaded,
    }


def _warm_up(bench: Bench) -> int:
    """Return the number of warm-up steps after which each image size is captured."""
    sizes = len(bench.data.prepared.facts.bucket_counts)
    return MIN_WARM_UP if sizes <= 1 else min(MAX_WARM_UP, max(MIN_WARM_UP, 3 * bench.data.plan.steps_per_epoch + 1))


def _parts(bench: Bench) -> dict[str, float]:
    """Return the seconds of each part of a step. Loader and verdict by the host's clock, all else by the device's."""
    marks, trainer = Marks(bench.start.device), bench.trainer
    with ExitStack() as stack:
        for owner, method, name in (
            (trainer.transfer, "send", SEND),
            (trainer.engine, "measured", LOSS),
            (trainer.optimizer, "step", STEP),
        ):
            stack.enter_context(marks.around(owner, method, name))
        events = bench.make_steps(PARTS_STEPS + EDGES)
    found = {name: statistics.fmean(event[f"{name}_s"] for event in events[1:-1]) for name in EVENT_PARTS}
    return found | {name: seconds / len(events) for name, seconds in marks.seconds().items()}


def _profiled(run: Callable[[], object], steps: int, device: torch.device, wanted: Wanted, name: str) -> Figures:
    path = wanted.folder / f"{name.replace(', ', '-').replace(' ', '-')}.trace.json.gz"
    found = summary(traced(run, device, path), steps)
    if wanted.profile:
        found["trace"] = str(path)
    else:
        path.unlink()
        del found["top"]
    return found


def _times(run: Callable[[], object], count: int) -> None:
    for _ in range(count):
        run()


def _held(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def _peaks(device: torch.device, held: int | None) -> Figures:
    on_gpu = device.type == "cuda"
    return {
        "held_bytes": held,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
    }
