"""Compares the memory plan's estimates with measured peaks, and measures SDXL under memory limits; random weights.

usage: python benchmarks/memory_plan.py ROOT [--only limits] [--limits-gib 24,16,12,8,6] [--toy] [--json FILE]

Each configuration (samples, pixels, rank, memory mode) is estimated beforehand on a model without weights. Then the
product's own model, adapter, transfer, passes and optimizer make steps, and the estimate is compared with the
allocator's peak. The first configuration is the probe: its measured peak corrects all estimates. Then allocator limits:
the plan chosen for each, its peak and its time. ``--toy`` rehearses on the CPU with the builtin model; the peak is then
the peak in a ledger of all tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_rocm.adapters.attach import inject
from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import empty_pools
from lora_rocm.device.placement.offloaded import Offload
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel, ModelFamily, family_for
from lora_rocm.kernels.backend import implementation_for
from lora_rocm.kernels.weight_format import use_implementation
from lora_rocm.memory.footprint import count, measured_rates, meta_model
from lora_rocm.memory.manager import MemoryManager, apply
from lora_rocm.memory.op_counter import Ledger
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.planning.step_plan import (
    Footprint,
    Mode,
    Plan,
    Rates,
    StepRequirements,
    choose,
    correction,
    plans_of,
    resident_bytes,
)
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.train.engine import Engine
from lora_rocm.train.graphs import Graphs

GIB = 2**30
WARM_UP, TIMED = 2, 3
ACCEPTED = 0.10


@dataclass(frozen=True)
class Case:
    """One configuration. ``share``: fraction of the blocks that are recomputed (selective) or offloaded."""

    rows: int
    side_px: int
    rank: int
    mode: Mode
    share: float = 1.0
    graphs: bool = False

    def __str__(self) -> str:
        return (
            f"batch {self.rows}, {self.side_px} px, rank {self.rank}, {self.mode}"
            + (f" {self.share:g}" if self.mode in ("selective", "offload") else "")
            + (", graph" if self.graphs else "")
        )


def cases(toy: bool) -> list[Case]:
    """Return the configurations, the probe first."""
    small, middle, large = (64, 96, 128) if toy else (512, 768, 1024)
    found = [Case(1, large, 16, "keep")]
    kept = ((1, small), (1, middle), (2, middle), (2, large), (4, large))
    found += [Case(rows, side, 16, "keep") for rows, side in kept]
    some = ((1, large, 0.5), (4, large, 0.5), (2, middle, 0.8))
    found += [Case(rows, side, 16, "selective", share) for rows, side, share in some]
    found += [Case(1, large, 16, "recompute"), Case(4, large, 16, "recompute"), Case(1, small, 16, "recompute")]
    if not toy:
        found += [Case(1, large, 16, "keep", graphs=True), Case(4, large, 16, "keep", graphs=True)]
        found += [Case(1, large, 16, "recompute", graphs=True)]
    found += [Case(1, large, 16, "offload", 0.3), Case(1, large, 16, "offload"), Case(4, large, 16, "offload")]
    if not toy:
        found += [Case(1, large, 16, "offload", graphs=True)]
    found += [Case(1, large, 64, "keep"), Case(2, middle, 64, "recompute"), Case(1, large, 64, "offload")]
    return found


def sdxl(toy: bool) -> dict[str, Any]:
    """Return the section ``model`` of a random SDXL."""
    return {"name_or_path": "random:builtin:tiny-sdxl" if toy else "random:sdxl"}


def make_recipe(model: dict[str, Any], toy: bool, root: Path, side_px: int, rank: int, rows: int) -> Recipe:
    """Return a recipe without images, which this benchmark never reads."""
    return recipe_from(
        {
            "model": model,
            "data": {"path": str(root), "resolution": side_px, "bucket_step": 32 if toy else 64},
            "lora": {"rank": rank, "targets": "attention"},
            "train": {"max_train_steps": 1, "batch_size": rows},
        }
    )


class Setup:
    """A model of one rank, ready to train; memory plans can be applied one after the other."""

    def __init__(self, model: dict[str, Any], toy: bool, root: Path, rank: int, device: torch.device) -> None:
        self.section, self.toy, self.root, self.rank, self.device = model, toy, root, rank, device
        self.recipe = self.recipe_at(64)
        self.dtype = torch.float32 if toy else torch.bfloat16
        self.family: ModelFamily = family_for(self.recipe)
        self.hollow = meta_model(self.family, self.recipe, self.dtype, not toy)
        self.counted: dict[int, Footprint] = {}
        self.load()

    def recipe_at(self, side_px: int) -> Recipe:
        return make_recipe(self.section, self.toy, self.root, side_px, self.rank, 1)

    def shape_at(self, side_px: int) -> SampleShape:
        return SampleShape.of(h=side_px, w=side_px)

    def load(self, plan: Plan | None = None) -> None:
        """Reload the model, on the device except for the weights that the plan offloads."""
        self.offload: Offload | None = None
        self.in_force: Plan | None = None
        self.model: LoadedModel | None = None
        self.optimizer: GatedOptimizer | None = None
        self.transfer = DeviceTransfer(self.device, pin=self.device.type == "cuda")
        gc.collect()  # an out-of-memory error may still hold memory
        empty_pools()
        started = time.perf_counter()
        device = torch.device("cpu") if plan and plan.offloaded else self.device
        model = self.family.load(self.dtype, device)
        adapter = inject(self.family, model, self.recipe.lora, 0)
        adapter.cast_inputs(False)
        if device != self.device:
            memory = MemoryManager(StepRequirements(), False, False, plan=plan)
            model.place(memory.placement(self.family, model, self.transfer, self.device.type == "cuda"))
        for component in model.components.values():
            component.train()
        model.device = self.device
        self.family.fuse(model)
        for component in model.components.values():
            use_implementation(component, implementation_for(self.device, True))
        weights, optim = adapter.flatten(self.dtype, torch.float32), self.recipe.optim
        how: dict[str, Any] = {"max_train_steps": 1000, "ema_decay": 0.0, "use_loss_scale": False}
        self.model, self.optimizer = (
            model,
            GatedOptimizer(weights, adapter.groups(optim, self.recipe.lora), optim, **how),
        )
        empty_pools()
        _say(f"rank {self.rank}: loaded in {time.perf_counter() - started:.1f} s")

    def footprint(self, side_px: int) -> Footprint:
        if side_px not in self.counted:
            self.counted[side_px] = count(self.family, self.hollow, self.recipe_at(side_px), self.shape_at(side_px))
        return self.counted[side_px]

    def put(self, plan: Plan) -> None:
        """Apply a plan. Offloaded weights do not return to the device; if the plan needs that, reload everything."""
        before = self.in_force
        if before is not None and (before.recomputed, before.offloaded) == (plan.recomputed, plan.offloaded):
            return
        if before is not None and set(before.offloaded) - set(plan.offloaded):
            self.load()
        elif self.offload is not None:
            self.offload.close()
        self.offload = apply(plan, self.family, self.model, self.transfer, pin=self.device.type == "cuda", again=True)
        self.in_force = plan

    def inputs(self, rows: int, side_px: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        batch = self.family.example(self.shape_at(side_px), rows)
        draws = self.family.objective.draw(batch, list(range(rows))).tensors
        batch["weight"] = torch.full((rows,), 1.0 / rows)
        return tuple({name: t.to(self.device) for name, t in part.items()} for part in (batch, draws))  # type: ignore[return-value]

    def engine(self, graphs: bool) -> Engine:
        captured = (
            Graphs(self.optimizer.weights, False, RunContext(lambda event: _say(str(event.to_json()))))
            if graphs
            else None
        )
        return Engine(self.family, self.model, self.optimizer.weights, self.optimizer.loss_scale, nullcontext, captured)

    def steps(self, plan: Plan, side_px: int, engine: Engine, count_steps: int) -> list[float]:
        """Return seconds of each step: all parts of a micro-batch, and the update."""
        batch, draws = self.inputs(plan.rows, side_px)
        seconds = []
        for _ in range(count_steps):
            _settle(self.device)
            started = time.perf_counter()
            for _ in range(plan.parts):
                engine.run(batch, draws)
            self.optimizer.step(0, self.transfer.bad)
            _settle(self.device)
            seconds.append(time.perf_counter() - started)
        return seconds


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def watching(setup: Setup, resident_bytes: int) -> Iterator[Callable[[], tuple[int, int]]]:
    """Yield a function that returns (peak of tensors, peak of the allocator) in bytes.

    On the CPU, resident tensors count as estimated by the plan; only temporary tensors are measured.
    """
    if setup.device.type == "cuda":
        empty_pools()
        torch.cuda.reset_peak_memory_stats(setup.device)
        yield lambda: (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        return
    gc.collect()
    known = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    with Ledger(iter(known)) as ledger:
        yield lambda: (resident_bytes + ledger.peak_bytes,) * 2


def plan_of(case: Case, footprint: Footprint) -> Plan:
    """Return the plan that the case asks for."""
    job, rates = StepRequirements(case.rows, graphs=case.graphs), Rates()
    variants = list(plans_of(case.mode, 1, footprint, job, rates))
    return variants[max(0, min(len(variants) - 1, round(case.share * len(variants)) - 1))]


def measure(setup: Setup, case: Case) -> dict[str, Any]:
    """Run steps of one configuration; return bytes and seconds."""
    footprint = setup.footprint(case.side_px)
    plan = plan_of(case, footprint)
    setup.put(plan)
    with watching(setup, resident_bytes(footprint, plan.offloaded)) as peak:
        engine = setup.engine(case.graphs)
        warm_up = WARM_UP + (1 if case.graphs else 0)
        seconds = setup.steps(plan, case.side_px, engine, warm_up + TIMED)[warm_up:]
        allocated, reserved = peak()
        engine.release()
    return {
        "case": str(case),
        "plan": plan,
        "estimate_bytes": plan.peak_bytes,
        "needed_bytes": plan.needed_bytes,
        "peak_bytes": allocated,
        "reserved_bytes": reserved,
        "correction": correction(plan, allocated, footprint),
        "step_s": statistics.median(seconds),
        "estimated_s": plan.step_s,
        "bad": float(setup.transfer.bad),
    }


def corrected(row: dict[str, Any], setup: Setup, case: Case, factor: float) -> int:
    """Return the estimate of a configuration after correction by the probe's measured peak."""
    plan, footprint = row["plan"], setup.footprint(case.side_px)
    resident = resident_bytes(footprint, plan.offloaded)
    return int(resident + (plan.peak_bytes - resident) * factor)


def limits_of(options: argparse.Namespace, setup: Setup, side_px: int) -> list[int]:
    """Return limits in bytes, descending; for a toy between the needs of keeping all and of recomputing all."""
    if not options.toy:
        return [int(limit) * GIB for limit in options.limits_gib.split(",")]
    footprint, job, rates = setup.footprint(side_px), StepRequirements(1), Rates()
    most, least = (next(iter(plans_of(mode, 1, footprint, job, rates))).needed_bytes for mode in ("keep", "recompute"))
    return [most, (most + least) // 2, least]


def limited(setup: Setup, limit_bytes: int, rates: Rates, factor: float, rows: int, side_px: int) -> dict[str, Any]:
    """Run SDXL steps under an allocator limit, with the plan chosen for it, first captured, then not."""
    footprint = setup.footprint(side_px)
    found: dict[str, Any] = {"limit_bytes": limit_bytes, "rows": rows}
    for graphs in (True, False) if setup.device.type == "cuda" else (False,):
        plan = choose(limit_bytes, footprint, StepRequirements(rows, graphs=graphs, correction=factor), rates)
        if plan is None:
            found[f"graphs {graphs}"] = {"plan": "none fits"}
            continue
        found[f"graphs {graphs}"] = limited_steps(setup, limit_bytes, plan, side_px)
        setup.optimizer.drop_gradients()
        empty_pools()
    return found


def limited_steps(
    setup: Setup, limit_bytes: int, plan: Plan, side_px: int, anew: bool = True, timed: int = TIMED
) -> dict[str, Any]:
    """Run steps of one plan. A separate function, so that its engine and the whole model are freed at its end.

    ``anew``: reload the model, as in a run: memory is not fragmented by freed weights.
    """
    if anew:
        setup.load(plan)
    setup.put(plan)
    said: dict[str, Any] = {"plan": text_of(plan)}
    said |= {"estimate_bytes": plan.peak_bytes, "needed_bytes": plan.needed_bytes}
    try:
        resident = resident_bytes(setup.footprint(side_px), plan.offloaded)
        with watching(setup, resident) as peak, allocator_limit(setup, limit_bytes):
            engine = setup.engine(plan.graphs)
            setup.steps(plan, side_px, engine, WARM_UP + 1)
            before = allocations(setup.device)
            seconds = setup.steps(plan, side_px, engine, timed)
            said |= {name: count - before[name] for name, count in allocations(setup.device).items()}
            allocated, reserved = peak()
            captured = engine.graphs is not None and any(engine.graphs.captured.values())
            engine.release()
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error) is None:
            raise
        return said | {"problem": str(error).splitlines()[0]}
    said |= {"step_s": statistics.median(seconds), "peak_bytes": allocated, "reserved_bytes": reserved}
    return said | {"captured": captured, "estimated_s": plan.step_s}


def allocations(device: torch.device) -> dict[str, int]:
    """Return how often the allocator asked the driver for memory, and how often it had to free some first.

    Both should stay constant over repeated steps: a driver call in each step makes it wait.
    """
    known = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: known.get(name, 0) for name in ("num_device_alloc", "num_alloc_retries")}


@contextmanager
def allocator_limit(setup: Setup, limit_bytes: int) -> Iterator[None]:
    """Make the allocator raise if it would hold more."""
    if setup.device.type != "cuda":
        yield
        return
    whole = torch.cuda.get_device_properties(setup.device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / whole, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def text_of(plan: Plan) -> str:
    """Describe a plan."""
    return f"{plan.mode}, {plan.parts} parts, {len(plan.recomputed)} recomputed, {len(plan.offloaded)} offloaded"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all configurations rank by rank, then the limits."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not options.toy else torch.device("cpu")
    rates, factor = Rates() if options.toy else measured_rates(device, torch.bfloat16), 1.0
    rows: list[dict[str, Any]] = []
    wanted = cases(options.toy)[: 1 if options.only else None]
    limits: list[dict[str, Any]] = []
    side_px = 128 if options.toy else 1024
    # one model per rank: its configurations, and once the limits
    for rank in dict.fromkeys(case.rank for case in wanted):
        setup = Setup(sdxl(options.toy), options.toy, options.root, rank, device)
        for case in [case for case in wanted if case.rank == rank]:
            row = measure(setup, case)
            factor = row["correction"] if not rows else factor
            row["corrected_bytes"] = corrected(row, setup, case, factor)
            rows.append(row)
            _say(line_of(row))
        if not limits:
            wanted_limits = limits_of(options, setup, side_px)
            for limit, batch in [(wanted_limits[0], 4), *((limit, 1) for limit in wanted_limits)]:
                limits.append(limited(setup, limit, rates, factor, batch, side_px))
                _say(json.dumps(limits[-1]))
        del setup
        empty_pools()
    # errors of the estimates after correction
    errors = [abs(row["corrected_bytes"] / row["peak_bytes"] - 1) for row in rows]
    _say(f"largest error after one probe: {max(errors):.1%} of {len(rows)} configurations (accepted: {ACCEPTED:.0%})")
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "rates": rates.__dict__,
        "correction": factor,
        "largest_error": max(errors),
        "rows": [{**row, "plan": text_of(row["plan"])} for row in rows],
        "limits": limits,
    }


def line_of(row: dict[str, Any]) -> str:
    """Return one configuration as text."""
    peak, before, after = (row[name] / GIB for name in ("peak_bytes", "estimate_bytes", "corrected_bytes"))
    return (
        f"{row['case']:44} peak {peak:7.3f} GiB, counted {before:7.3f} ({before / peak - 1:+.1%}), after the probe "
        f"{after:7.3f} ({after / peak - 1:+.1%}), held {row['reserved_bytes'] / GIB:7.3f}, "
        f"step {1e3 * row['step_s']:.0f} ms, bad {row['bad']:g}"
    )


def main() -> None:
    """Measure and print; exit code 1 if an estimate's error exceeds the accepted one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", choices=["limits"], help="the probe, and then the limits")
    parser.add_argument("--limits-gib", default="24,16,12,8,6", help="the first also with four samples")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    found = run(options)
    found["wall_s"] = time.perf_counter() - started
    _say(f"{found['wall_s']:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.exit(found["largest_error"] > ACCEPTED)


if __name__ == "__main__":
    main()
