"""Kept tensors: chosen by budget and recipe, applied to the model, and corrected by the measurement of a first pass."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.placement import offloaded
from lora_rocm.device.placement.offloaded import Offload
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.errors import UserError
from lora_rocm.families.base import LoadedModel, family_for
from lora_rocm.families.common.recompute import Run
from lora_rocm.families.objectives.base import Draws, Prediction
from lora_rocm.families.objectives.loss import losses
from lora_rocm.hardware.settings import Settings
from lora_rocm.memory import manager as memory_module
from lora_rocm.memory.footprint import count
from lora_rocm.memory.manager import MemoryManager, apply, choose_from, decide, rates_here
from lora_rocm.planning import step_plan
from lora_rocm.planning.step_choice import choose, parts_of, plans_of
from lora_rocm.planning.step_plan import (
    Footprint,
    Mode,
    Plan,
    Rates,
    StepRequirements,
    activation_bytes,
    resident_bytes,
)
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import NOBODY, RunContext
from tests.supervisor.fake_run import listening
from tests.wording import mentions, says

CPU, META = torch.device("cpu"), torch.device("meta")
WIDTH, BLOCKS, BATCH = 64, 6, 4


class Layers(nn.Module):
    """Blocks that keep much and give out little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        for block in self.blocks:
            block[0].requires_grad_(False)
        self.run: Run = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.run(block, x) if torch.is_grad_enabled() else block(x)
        return x


class Chain:
    """A family in miniature, and its objective."""

    name = "chain"

    @property
    def objective(self) -> Chain:
        return self

    def blocks(self, model: LoadedModel) -> list[nn.Module]:
        return list(model.components["net"].blocks)

    def recompute_activations(self, model: LoadedModel, run: Run | None = None) -> None:
        assert run is not None
        model.components["net"].run = run

    def example(self, shape: SampleShape, rows: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(rows, shape["h"], WIDTH)}

    def draw(self, batch: dict[str, Tensor], seeds: list[int]) -> Draws:
        return Draws({"noise": torch.zeros(len(seeds), 1)})

    def predict(self, model: LoadedModel, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> Prediction:
        made = model.components["net"](batch["x"])
        return Prediction(made, torch.zeros_like(made), made.new_ones(len(made)))


def recipe(memory: str = "auto", **train: Any) -> Recipe:
    return recipe_from(
        {
            "model": {"name_or_path": "random:builtin:tiny-sdxl"},
            "data": {"path": "x"},
            "train": {"max_train_steps": 1, "batch_size": BATCH} | train,
            "runtime": {"memory": memory},
        }
    )


@pytest.fixture(autouse=True)
def small_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's slack is more than this whole model takes."""
    monkeypatch.setattr(step_plan, "SLACK_BYTES", 0)


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    model = LoadedModel({"net": Layers().to(META)}, torch.float32, META)
    counted = count(Chain(), model, recipe(), SampleShape.of(h=32, w=32))  # type: ignore[arg-type]
    return replace(
        counted, gradient_bytes=0, landing_bytes=0
    )  # half of all weights are trained here: that would hide the activations


class Machine:
    """Passes on a fake GPU: activations take ``factor`` times what is counted, of ``memory_bytes`` in all."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, memory: MemoryManager, factor: float, memory_bytes: int
    ) -> None:
        self.memory, self.factor, self.memory_bytes = memory, factor, memory_bytes
        self.passes, self.full = 0, 0
        monkeypatch.setattr(memory_module, "peak_bytes", lambda device: self.taken())
        self.family, self.transfer = Chain(), DeviceTransfer(CPU, pin=False)
        self.model = LoadedModel({"net": Layers()}, torch.float32, CPU)
        self.model.place(memory.placement(self.family, self.model, self.transfer, pin=False))  # type: ignore[arg-type]

    def taken(self) -> int:
        plan, net = self.memory.plan, self.memory.footprint
        assert plan is not None and net is not None
        of_blocks = (plan.recomputed, plan.offloaded, plan.attention, plan.offloads_inputs)
        activations = self.factor * plan.rows * activation_bytes(net, *of_blocks)
        return int(resident_bytes(net, plan.offloaded) + activations)

    def run(self, batch: dict[str, Tensor], draws: dict[str, Tensor]) -> None:
        self.passes += 1
        assert len(batch["x"]) == self.memory.plan.rows  # type: ignore[union-attr]
        losses(self.family, self.model, batch, draws).sum().backward()
        if self.taken() > self.memory_bytes:
            self.full += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def probe(self) -> None:
        self.memory.apply(self.family, self.model)  # type: ignore[arg-type]
        self.memory.probe(self.family, self.model, self.transfer, self.run)  # type: ignore[arg-type]


def memory_of(footprint: Footprint, budget_bytes: int, context: RunContext = NOBODY) -> MemoryManager:
    return choose_from(recipe(), footprint, StepRequirements(batch_size=BATCH), budget_bytes, context)


def needs(footprint: Footprint, recomputed: range | tuple[int, ...] = (), rows: int = BATCH) -> int:
    return int(resident_bytes(footprint, ()) + 1.1 * rows * activation_bytes(footprint, recomputed))


def test_with_room_nothing_is_given_up_and_nothing_said(footprint: Footprint) -> None:
    said: list[str] = []
    memory = memory_of(footprint, needs(footprint), listening(said))
    assert memory.plan is not None and memory.plan.mode == "keep"
    assert (memory.parts, memory.recomputes_all, said) == (1, False, [])


def test_without_it_what_is_given_up_is_said(footprint: Footprint) -> None:
    said: list[str] = []
    memory = memory_of(footprint, needs(footprint, rows=1), listening(said))
    assert memory.plan is not None and (memory.plan.mode != "keep" or memory.parts > 1)
    assert len(said) == 1 and memory.plan.mode in said[0]


@pytest.mark.parametrize("graphs", [True, False])  # False: the control, nothing is given up
def test_graphs_that_there_is_no_room_for_are_not_given_up_in_silence(footprint: Footprint, graphs: bool) -> None:
    said: list[str] = []
    job = StepRequirements(batch_size=BATCH, graphs=graphs)
    memory = choose_from(recipe(), footprint, job, needs(footprint), listening(said))
    assert memory.plan is not None and memory.plan.mode == "keep" and not memory.captures
    assert [text for text in said if mentions(text, "memory/no-room-for-graphs")] == said and len(said) == graphs


def test_what_cannot_fit_is_refused_before_loading(footprint: Footprint) -> None:
    with pytest.raises(UserError) as caught:
        memory_of(footprint, 1000)
    assert caught.value.code == "does-not-fit"


def test_what_nearly_fits_is_tried(footprint: Footprint) -> None:
    """The allocator's slack is an estimate: it may do with less."""
    everything = StepRequirements(batch_size=BATCH)
    peak = min(plan.peak_bytes for plan in _all(footprint, everything))
    least = min(plan.needed_bytes for plan in _all(footprint, everything))
    assert choose((peak + least) // 2, footprint, everything, Rates()) is None
    assert memory_of(footprint, (peak + least) // 2).plan is not None


def _all(footprint: Footprint, job: StepRequirements) -> list[Plan]:
    ways = [(mode, parts) for parts in parts_of(job) for mode in job.modes]
    return [plan for mode, parts in ways for plan in plans_of(mode, parts, footprint, job, Rates())]


def test_a_pass_as_it_was_counted_changes_nothing(footprint: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, memory_of(footprint, needs(footprint)), 1.0, needs(footprint))
    before = machine.memory.plan
    machine.probe()
    assert machine.passes == 1
    assert before is not None and machine.memory.plan is not None
    assert machine.memory.plan.recomputed == before.recomputed == ()
    assert machine.memory.job.correction == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("is_ample_still", [True, False])
def test_no_pass_is_run_where_there_is_ample_room(
    is_ample_still: bool, footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless other programs have taken it since the plan was chosen."""
    memory = memory_of(footprint, 4 * needs(footprint))
    machine = Machine(monkeypatch, memory, 1.0, needs(footprint))
    memory.room = lambda: (4 if is_ample_still else 1) * needs(footprint)
    machine.probe()
    assert machine.passes == (0 if is_ample_still else 1)


@pytest.mark.parametrize("share", [1.0, 0.98])  # 1.0: the control, everything was kept from the beginning
def test_room_that_other_programs_freed_is_used(
    share: float, footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = memory_of(footprint, int(share * needs(footprint)))
    assert memory.plan is not None and (memory.plan.mode == "keep") is (share == 1.0)
    machine = Machine(monkeypatch, memory, 1.0, 4 * needs(footprint))
    memory.room = lambda: 4 * needs(footprint)
    machine.probe()
    assert (memory.plan.mode, memory.parts, machine.passes > 0) == ("keep", 1, share != 1.0)


@pytest.mark.parametrize("factor", [1.3, 1.8, 2.5])
def test_a_pass_that_runs_out_of_memory_ends_in_a_plan_that_does_not(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    said: list[str] = []
    budget = needs(footprint)
    machine = Machine(monkeypatch, memory_of(footprint, budget, listening(said)), factor, budget)
    machine.probe()
    assert machine.full >= 1
    assert machine.taken() <= budget
    assert said and says(said[0], "memory/ran-out-of-memory")
    assert machine.passes <= memory_module.TRIES


def test_a_pass_that_takes_more_than_there_should_be_is_answered_before_it_runs_out(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    budget = needs(footprint)
    machine = Machine(monkeypatch, memory_of(footprint, budget, listening(said)), 1.5, 10 * budget)
    machine.probe()
    assert machine.full == 0 and machine.taken() <= budget and "took" in said[0]


def test_a_pass_that_takes_less_makes_the_plan_faster(footprint: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = needs(footprint, range(BLOCKS // 2))
    machine = Machine(monkeypatch, memory_of(footprint, budget), 0.5, budget)
    before = machine.memory.plan
    machine.probe()
    assert before is not None and machine.memory.plan is not None
    assert machine.memory.plan.step_s < before.step_s
    assert machine.taken() <= budget


def test_where_nothing_is_left_the_run_goes_on_to_its_own_relief(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = needs(footprint)
    machine = Machine(monkeypatch, memory_of(footprint, budget), 1.0, 0)
    machine.probe()
    assert machine.full == machine.passes <= memory_module.TRIES


def test_without_a_limit_a_pass_that_runs_out_takes_the_plan_that_needs_least(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with runtime.memory: selective; its memory is full all the same."""
    job = StepRequirements(batch_size=BATCH, modes=("selective",))
    memory = choose_from(recipe("selective"), footprint, job, None, NOBODY)
    machine = Machine(monkeypatch, memory, 1.0, 0)
    before = memory.plan
    machine.probe()
    assert before is not None and memory.plan is not None and machine.full == 2
    assert memory.plan.parts == BATCH and memory.plan.needed_bytes < before.needed_bytes


def test_another_error_of_the_pass_is_not_taken_for_memory(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, memory_of(footprint, needs(footprint)), 1.0, needs(footprint))

    def broken(batch: dict[str, Tensor], draws: dict[str, Tensor]) -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        machine.memory.probe(machine.family, machine.model, machine.transfer, broken)  # type: ignore[arg-type]


def test_weights_that_are_offloaded_late_stay_right(footprint: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass runs out of memory, and in the end blocks that were on the device wait in main memory."""
    wanted = _gradients(LoadedModel({"net": Layers()}, torch.float32, CPU))
    budget = needs(footprint)
    memory = memory_of(footprint, budget)
    memory.job = replace(memory.job, modes=("offload",), all_offloaded=True)
    machine = Machine(monkeypatch, memory, 3.0, budget)
    machine.probe()
    assert memory.offload is not None and memory.recomputes_all
    machine.model.components["net"].zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(_gradients(machine.model), wanted, strict=True))
    assert not machine.transfer.bad


def test_places_of_one_offload_are_gone_before_the_next_one_takes_its_own(
    footprint: Footprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Offload]] = []
    left: list[int] = []

    class Watched(Offload):
        def __init__(self, *how: Any) -> None:
            left.append(sum(each() is not None for each in alive))
            super().__init__(*how)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(offloaded, "Offload", Watched)
    memory = memory_of(footprint, needs(footprint))
    memory.job = replace(memory.job, modes=("offload",))
    memory.plan = next(plan for plan in _all(footprint, memory.job) if plan.mode == "offload")
    machine = Machine(monkeypatch, memory, 1.0, 0)
    machine.probe()
    assert len(left) > 1 and not any(left)


def _gradients(model: LoadedModel) -> list[Tensor]:
    net = model.components["net"]
    net(torch.ones(2, 8, WIDTH)).square().mean().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("memory", "checkpointing", "recomputes", "offloads"),
    [
        ("auto", False, False, False),
        ("auto", True, True, False),
        ("keep", False, False, False),
        ("keep", True, True, False),
        ("recompute", False, True, False),
        ("offload", False, True, True),
        ("offload", True, True, True),
        ("attention", False, True, False),
        ("inputs", False, True, False),
    ],
)
def test_on_the_cpu_it_is_as_the_recipe_says(
    memory: str, checkpointing: bool, recomputes: bool, offloads: bool
) -> None:
    asked = recipe(memory, gradient_checkpointing=checkpointing and memory == "auto")
    settings, family = Settings(micro_batch_parts=2, checkpointing=checkpointing), Chain()
    found = decide(asked, family, CPU, torch.float32, settings, SampleShape.of(h=32, w=32), NOBODY)  # type: ignore[arg-type]
    assert (found.recomputes, found.asked == "offload", found.plan) == (recomputes, offloads, None)
    assert found.parts == 2 and found.recomputes_all == (recomputes and memory != "attention")


def test_a_gpu_is_measured_unless_each_start_has_to_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, gpu, measured, pinned = recipe(), torch.device("cuda"), Rates(flops=7e14, known=True), []

    def measure(device: torch.device, dtype: torch.dtype, pin: bool, attending: object, compute: str) -> Rates:
        pinned.append(pin)
        return measured

    monkeypatch.setattr(memory_module, "measured_rates", measure)
    fixed = asked.model_copy(update={"runtime": asked.runtime.model_copy(update={"deterministic": True})})
    assert rates_here(asked, gpu, torch.bfloat16, Settings()) is measured
    assert rates_here(asked, gpu, torch.bfloat16, Settings(copy_method="unpinned")) is measured
    assert (
        rates_here(fixed, gpu, torch.bfloat16, Settings())
        == Rates()
        == rates_here(asked, CPU, torch.float32, Settings())
    )
    never = asked.model_copy(update={"runtime": asked.runtime.model_copy(update={"pin_memory": "no"})})
    assert rates_here(never, gpu, torch.bfloat16, Settings()) is measured
    assert rates_here(asked, gpu, torch.bfloat16, Settings(pin_memory=False)) is measured
    assert pinned == [True, False, False, False]


def test_a_gpu_too_full_to_be_measured_is_planned_for_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: str) -> None:
        def measure(*given: object, **named: object) -> Rates:
            raise RuntimeError(words)

        monkeypatch.setattr(memory_module, "measured_rates", measure)

    fails("HIP out of memory. Tried to allocate 256.00 MiB.")
    assert rates_here(recipe(), torch.device("cuda"), torch.float32, Settings()) == Rates()
    fails("HIP error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        rates_here(recipe(), torch.device("cuda"), torch.float32, Settings())


def test_what_is_chosen_goes_by_the_rates(footprint: Footprint) -> None:
    """With launches of a slow host and a fast GPU, captured blocks are faster, though they need more recomputing."""
    job = StepRequirements(graphs=True, modes=("keep", "recompute"))  # one sample: no smaller parts would fit
    keep, again = (planned_bytes(mode, footprint, job) for mode in ("keep", "recompute"))
    captured, launched = keep
    assert launched < captured
    budget = max(launched, again[0])
    assert budget < captured
    slow_host = Rates(flops=1e18, moved_bytes=1e18, launch_s=0.0, host_launch_s=1.0)
    fast_host = Rates(flops=1e6, moved_bytes=1e6, launch_s=0.0, host_launch_s=0.0)
    said: list[str] = []
    found = [choose_from(recipe(), footprint, job, budget, listening(said), rates) for rates in (slow_host, fast_host)]
    assert [(memory.plan.mode, memory.plan.graphs) for memory in found if memory.plan] == [
        ("recompute", True),
        ("keep", False),
    ]


def planned_bytes(mode: Mode, footprint: Footprint, job: StepRequirements) -> tuple[int, int]:
    """Memory that a mode needs: captured, launched."""
    ways = (job, replace(job, graphs=False))
    captured, launched = (next(plans_of(mode, 1, footprint, way, Rates())).needed_bytes for way in ways)
    return captured, launched


def test_a_plan_is_put_into_a_model(footprint: Footprint) -> None:
    family, model = Chain(), LoadedModel({"net": Layers()}, torch.float32, CPU)
    wanted = _gradients(model)
    plans = {plan.mode: plan for plan in _all(footprint, StepRequirements(batch_size=1))}
    for mode in ("selective", "attention", "recompute", "inputs", "keep", "offload"):
        model.components["net"].zero_grad()
        door = DeviceTransfer(CPU, pin=False)
        offload = apply(plans[mode], family, model, door, pin=False, again=True)  # type: ignore[arg-type]
        assert (offload is not None) == (mode == "offload")
        assert all(torch.equal(a, b) for a, b in zip(_gradients(model), wanted, strict=True)), mode


def test_selective_on_the_cpu_goes_by_what_is_counted(footprint: Footprint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "counted", lambda *_: footprint)
    how = (Chain(), CPU, torch.float32, Settings(), SampleShape.of(h=32, w=32), NOBODY)
    found = decide(recipe("selective"), *how)  # type: ignore[arg-type]
    assert found.plan is not None and found.plan.mode == "selective" and not found.recomputes_all
    monkeypatch.setattr(memory_module, "counted", lambda *_: pytest.fail("it was counted"))
    assert decide(recipe("keep"), *how).plan is None  # type: ignore[arg-type]


@pytest.mark.slow  # the same after SDXL's blocks were counted
def test_selective_on_the_cpu_recomputes_some(tmp_path: Path) -> None:
    asked = recipe("selective").model_copy(update={"cache": recipe().cache.model_copy(update={"dir": str(tmp_path)})})
    found = decide(asked, family_for(asked), CPU, torch.float32, Settings(), SampleShape.of(h=64, w=64), NOBODY)
    assert found.plan is not None and found.plan.mode == "selective" and not found.recomputes_all


def test_what_waits_in_main_memory_stays_there_when_memory_runs_out(footprint: Footprint) -> None:
    """The relief recomputes all of all blocks, but moves their inputs all the same."""
    family: Any = Chain()
    model = LoadedModel({"net": Layers()}, torch.float32, CPU)
    wanted = _gradients(model)
    for asked, all_given_up in (("inputs", True), ("attention", False), ("recompute", True)):
        memory = MemoryManager(StepRequirements(), True, asked)  # type: ignore[arg-type]
        model.place(memory.placement(family, model, DeviceTransfer(CPU, pin=False), pin=False))
        memory.apply(family, model)
        assert memory.recomputes_all is all_given_up and (memory.inputs is not None) == (asked == "inputs")
        family.recompute_activations(model, memory.least_recomputing(family, model))
        before = 0 if memory.inputs is None else memory.inputs.moved_bytes
        model.components["net"].zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(_gradients(model), wanted, strict=True))
        assert (memory.inputs is not None and memory.inputs.moved_bytes > before) == (asked == "inputs")


def test_inputs_of_an_earlier_plan_are_gone_before_the_next_one_takes_its_own(footprint: Footprint) -> None:
    family: Any = Chain()
    model = LoadedModel({"net": Layers()}, torch.float32, CPU)
    memory = MemoryManager(StepRequirements(), True, "inputs")
    model.place(memory.placement(family, model, DeviceTransfer(CPU, pin=False), pin=False))
    memory.apply(family, model)
    _gradients(model)
    assert memory.inputs is not None
    before = weakref.ref(memory.inputs)
    memory.asked = "recompute"
    memory.apply(family, model, again=True)
    assert memory.inputs is None and before() is None
