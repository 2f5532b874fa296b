"""The memory plan of a run.

It is chosen before the base is loaded, applied to the model, and corrected by a probe pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from lora_rocm.dataset.shape import SampleShape
from lora_rocm.device.allocator import empty_pools, room_bytes
from lora_rocm.device.attention import Context, context_of
from lora_rocm.device.device_memory import shares_main_memory
from lora_rocm.device.placement.embedding_rows import TokenTable
from lora_rocm.device.placement.offloaded import Offload, Offloaded
from lora_rocm.device.torch_errors import out_of_memory
from lora_rocm.device.transfer import DeviceTransfer
from lora_rocm.families.base import LoadedModel, ModelFamily, Tensors, token_table
from lora_rocm.families.common.block_inputs import BlockInputs
from lora_rocm.families.common.probe_batch import send_zeros
from lora_rocm.families.common.recompute import Recomputing
from lora_rocm.foundation.units import size_text
from lora_rocm.hardware.settings import Settings
from lora_rocm.kernels.backend import Implementation
from lora_rocm.memory.footprint import counted, measured_rates
from lora_rocm.planning.step_choice import choose, has_ample_room, smallest
from lora_rocm.planning.step_plan import Footprint, Mode, Plan, Rates, StepChoice, StepRequirements, correction, planned
from lora_rocm.planning.step_requirements import does_not_fit, job_of, plan_text
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.run_context import NOBODY, RunContext

TRIES = 6
"""Maximum number of probe passes. If even the last one runs out of memory, the run relies on ``oom_recovery``."""
SHORT = 1.15
"""Factor for the estimate of activations, applied when a probe pass has run out of memory."""
WORTH = 0.97
"""To save time, another plan is used only if its step takes at most this share of the current plan's time."""
Pass = Callable[[Tensors, Tensors], object]


@dataclass
class MemoryManager:
    """A memory plan, the inputs from which it is chosen, and its application to the model.

    Attributes:
        plan: the plan, or None on the CPU, where memory is not planned. In this case only ``recomputes`` and
            ``asked`` apply.
        recomputes: whether all blocks are recomputed, if there is no plan.
        asked: the only mode that the recipe allows, if there is no plan; else None.
        budget_bytes: memory available for tensors, or None if no limit is known.
        context: receives a notice when a feature is disabled or the plan changes.
        again: returns contexts in which blocks are recomputed, or None.
        room: measures the budget again, because other programs may have changed it; None if it cannot be measured.
        implementation: kernel backend of the fingerprints of block inputs.
        inputs: keeps block inputs in main memory; None if they stay on the device.
    """

    job: StepRequirements
    recomputes: bool
    asked: Mode | None
    context: RunContext = NOBODY
    footprint: Footprint | None = None
    plan: Plan | None = None
    budget_bytes: int | None = None
    rates: Rates = field(default_factory=Rates)
    again: Context | None = None
    room: Callable[[], int] | None = None
    implementation: Implementation = "eager"
    inputs: BlockInputs | None = field(default=None, init=False)
    _placement: Offloaded | None = field(default=None, init=False)
    _pin: bool = field(default=False, init=False)
    _ran_out: bool = field(default=False, init=False)

    @property
    def parts(self) -> int:
        """The number of parts into which a micro-batch is split."""
        return self.job.min_parts if self.plan is None else self.plan.parts

    @property
    def captures(self) -> bool:
        """Whether the plan allows passes to be captured as graphs."""
        return self.plan is None or self.plan.graphs

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradient buffer stays allocated during a step's passes, in addition to their activations."""
        return self.plan is not None and self.plan.keeps_gradients

    @property
    def recomputes_all(self) -> bool:
        """Whether all of all blocks is already recomputed, so that recomputation cannot save more memory."""
        if self.plan is None or self.footprint is None:
            return self.recomputes and self.asked != "attention"
        keeps = self.plan.attention or self.plan.unpacks_once
        return len(self.plan.recomputed) == len(self.footprint.blocks) and not keeps

    @property
    def kernels(self) -> tuple[str, ...] | None:
        """Names of the Triton kernels that a step launches; None if unknown, because no footprint was counted."""
        return None if self.footprint is None else self.footprint.kernels

    @property
    def offload(self) -> Offload | None:
        """The object that fetches offloaded blocks from main memory; None if no block is offloaded."""
        return None if self._placement is None else self._placement.offload

    def placement(self, family: ModelFamily, model: LoadedModel, transfer: DeviceTransfer, pin: bool) -> Offloaded:
        """Return a placement of the model's weights that follows the plan, even after ``probe`` changes it.

        Args:
            family: the model's family.
            model: the model; its weights may already be on the device.
            transfer: the transfer to the device. Its verdict also covers weights fetched from main memory.
            pin: whether offloaded weights are in pinned memory.
        """
        self._pin = pin
        blocks = lambda: self._offloaded(family.blocks(model))  # noqa: E731
        self._placement = Offloaded(transfer, blocks, pin, table=lambda: self._table(family, model))
        return self._placement

    def apply(self, family: ModelFamily, model: LoadedModel, again: bool = False) -> None:
        """Apply the plan to a model that has its ``placement``. Call it after the modules are fused.

        ``again``: whether another plan was applied before.
        """
        assert self._placement is not None
        self._placement.hold()
        if self.inputs is not None:
            self.inputs.close()  # no copy into its memory may be in flight once this is freed
            self.inputs = None
        blocks = family.blocks(model)
        choice = self._choice(len(blocks))
        if choice.offloads_inputs:
            how = (self._placement.transfer, self._pin, self.implementation)
            self.inputs = BlockInputs(blocks, *how)
        if choice.recomputed or again:
            family.recompute_activations(model, self._recomputing(model, blocks, choice))

    def least_recomputing(self, family: ModelFamily, model: LoadedModel) -> Recomputing:
        """Return the recomputation of all blocks that keeps least. Weights and inputs in main memory stay there."""
        blocks = family.blocks(model)
        return self._recomputing(model, blocks, StepChoice(tuple(range(len(blocks)))))

    def _recomputing(self, model: LoadedModel, blocks: list[nn.Module], choice: StepChoice) -> Recomputing:
        everything = len(choice.recomputed) == len(blocks)
        return Recomputing(
            model,
            None if everything else [blocks[index] for index in choice.recomputed],
            everything and self.offload is None and not choice.attention,
            self.again,
            keeping_attention=[blocks[index] for index in choice.attention],
            unpacks_once=choice.unpacks_once,
            inputs=self.inputs,
        )

    def _choice(self, num_blocks: int) -> StepChoice:
        """Return the plan's choice. Without a plan, unpacked weights always stay for the backward pass of a block."""
        if self.plan is not None:
            return self.plan.choice
        every = tuple(range(num_blocks))
        return StepChoice(
            every if self.recomputes else (),
            every if self.asked == "offload" else (),
            every if self.asked == "attention" else (),
            self.asked == "inputs",
            self.recomputes,
        )

    def _table(self, family: ModelFamily, model: LoadedModel) -> TokenTable | None:
        """Return the token embedding if the plan keeps it in main memory."""
        looks_up = self.plan is not None and self.plan.looks_up_rows
        return token_table(family, model) if looks_up else None

    def _offloaded(self, blocks: list[nn.Module]) -> list[nn.Module]:
        return [blocks[index] for index in self._choice(len(blocks)).offloaded]

    def probe(self, family: ModelFamily, model: LoadedModel, transfer: DeviceTransfer, run: Pass) -> None:
        """Run one pass with zeros of the largest shape before the first step, and measure its memory.

        The measurement corrects the estimates. The plan is replaced if it does not fit, or if another one is faster. A
        plan that runs out of memory is replaced at once. Does nothing if memory is not planned, or if the plan keeps
        everything and there is ample room for it (``has_ample_room``).

        Args:
            family: the model's family.
            model: the model on the device.
            transfer: the transfer that sends the zeros.
            run: runs one forward and backward pass. The caller drops its gradients.
        """
        if self.plan is None or self.footprint is None:
            return
        if self.room is not None:
            self.budget_bytes = self.room()
        now = self.plan
        keeps_all = (now.choice, now.parts, now.graphs) == (StepChoice(), self.job.min_parts, self.job.graphs)
        if keeps_all and has_ample_room(self.budget_bytes, self.footprint, self.job):
            return  # a plan from when there was less room is replaced below
        for _ in range(TRIES):
            peak_bytes = self._peak(family, transfer, run, self.plan.rows)
            if self.room is not None:
                self.budget_bytes = self.room()
            wanted = self._next(peak_bytes)
            if wanted is None:
                return
            met = "ran out of memory" if peak_bytes is None else f"took {size_text(peak_bytes)}"
            self.context.notice(f"A first pass {met}. From here on: {_text(wanted, self.job)}.")
            self.plan = wanted
            self.apply(family, model, again=True)

    def _peak(self, family: ModelFamily, transfer: DeviceTransfer, run: Pass, rows: int) -> int | None:
        """Peak bytes of tensors during a probe pass; None if it ran out of memory."""
        assert self.footprint is not None
        zeros = send_zeros(family, transfer, SampleShape.parse(self.footprint.shape), rows)
        empty_pools()
        reset_peak(transfer.device)
        try:
            run(*zeros)
            return peak_bytes(transfer.device)
        except (RuntimeError, MemoryError) as error:
            if out_of_memory(error) is None:
                raise
        empty_pools()  # not earlier: the traceback kept the activations alive
        return None

    def _next(self, peak: int | None) -> Plan | None:
        """The plan to continue with after a probe pass, or None to keep the current one.

        Offloaded weights and the token embedding stay in main memory.

        ``peak``: peak bytes of the pass, or None if it ran out of memory.
        """
        assert self.plan is not None and self.footprint is not None
        now = self.plan
        wanted = self._after_a_full_pass(now) if peak is None else self._after(now, peak)
        if wanted is None or set(now.offloaded) - set(wanted.offloaded):
            return None
        if now.looks_up_rows and not wanted.looks_up_rows:
            return None
        return None if wanted.same(now) else wanted

    def _after(self, now: Plan, peak: int) -> Plan | None:
        """The best plan by the corrected estimates, if the current one does not fit or is slower; otherwise None.

        If an earlier pass ran out of memory, only a plan that does not fit is replaced.
        """
        assert self.footprint is not None
        self._correct(correction(now, peak, self.footprint, self.job.correction))
        wanted = choose(self.budget_bytes, self.footprint, self.job, self.rates)
        assert self.plan is not None
        fits = self.budget_bytes is None or self.plan.needed_bytes <= self.budget_bytes
        if wanted is None or (fits and (self._ran_out or now.offloaded or wanted.step_s > WORTH * now.step_s)):
            return None
        return wanted

    def _after_a_full_pass(self, now: Plan) -> Plan | None:
        """The next plan for which a lower memory use is estimated."""
        assert self.footprint is not None
        self._ran_out = True
        least = smallest(self.footprint, self.job, self.rates)
        if self.budget_bytes is None:  # without a budget no correction makes a plan too large
            return least
        wanted: Plan | None = now
        while wanted is not None and wanted.same(now) and not now.same(least):
            self._correct(self.job.correction * SHORT)
            wanted = choose(self.budget_bytes, self.footprint, self.job, self.rates)
        return wanted or smallest(self.footprint, self.job, self.rates)

    def _correct(self, factor: float) -> None:
        assert self.plan is not None and self.footprint is not None
        now, self.job = self.plan, replace(self.job, correction=factor)
        job = replace(self.job, graphs=now.graphs)
        self.plan = planned(now.mode, now.parts, now.choice, self.footprint, job, self.rates)


def decide(
    recipe: Recipe,
    family: ModelFamily,
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    shape: SampleShape,
    context: RunContext,
    shapes: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> MemoryManager:
    """Choose the memory plan for this device.

    Args:
        recipe: the run's recipe.
        family: the recipe's family.
        device: the training device.
        dtype: dtype of the frozen base.
        settings: the parent's settings for this machine.
        shape: shape of the run's largest samples.
        context: receives a notice when a feature is disabled.
        shapes: number of different shapes of the run's samples.
        wait: waits for a process that counts the step's memory.

    Raises:
        UserError: "does-not-fit", the smallest plan exceeds the budget.
    """
    on_gpu = device.type == "cuda"
    job = job_of(recipe, settings, on_gpu=on_gpu, can_offload=not shares_main_memory(device), shapes=shapes)
    if not on_gpu and recipe.runtime.memory != "selective":
        asked = job.modes[0] if len(job.modes) == 1 else None
        return MemoryManager(job, "keep" not in job.modes, asked, context)
    room = partial(room_bytes, device, settings, steady=recipe.runtime.deterministic) if on_gpu else None
    budget_bytes = room() if room is not None else None  # before the measurement below takes memory
    wait()
    footprint = counted(recipe, family, dtype, settings, shape, on_gpu)
    # Measuring takes a second, so it is skipped where it cannot change the choice
    is_ample = has_ample_room(budget_bytes, footprint, job)
    rates = Rates() if is_ample else rates_here(recipe, device, dtype, settings)
    memory = choose_from(recipe, footprint, job, budget_bytes, context, rates)
    memory.room = room
    return memory


def rates_here(recipe: Recipe, device: torch.device, dtype: torch.dtype, settings: Settings) -> Rates:
    """Measure the speed of this GPU, as ``lora-rocm plan`` does.

    A deterministic run and the CPU use fixed rates, so that every start of such a run chooses the same plan.
    """
    if device.type != "cuda" or recipe.runtime.deterministic:
        return Rates()
    try:
        pin = settings.pins(recipe.runtime.pin_memory)
        return measured_rates(device, dtype, pin, context_of(settings.attention), recipe.model.compute)
    except RuntimeError as error:
        if out_of_memory(error) is None:
            raise
        return Rates()
    finally:
        empty_pools()


def choose_from(
    recipe: Recipe,
    footprint: Footprint,
    job: StepRequirements,
    budget_bytes: int | None,
    context: RunContext,
    rates: Rates = Rates(),  # noqa: B008 (frozen)
) -> MemoryManager:
    """Choose the memory plan from a footprint and a budget, as ``decide`` does."""
    plan = choose(budget_bytes, footprint, job, rates)
    if plan is None:
        plan = smallest(footprint, job, rates)
        if budget_bytes is not None and plan.peak_bytes > budget_bytes:
            raise does_not_fit(recipe, footprint, job, rates, budget_bytes)
    if budget_bytes is not None and (plan.mode != "keep" or plan.parts > 1 or plan.graphs != job.graphs):
        context.notice(
            f"A step will take {size_text(plan.peak_bytes)} of {size_text(budget_bytes)}: {_text(plan, job)}."
        )
    return MemoryManager(job, False, None, context, footprint, plan, budget_bytes, rates)


def _text(plan: Plan, job: StepRequirements) -> str:
    """Describe the plan, including whether there is too little memory to capture graphs."""
    return plan_text(plan) + (", not captured: too little memory for graphs" if job.graphs and not plan.graphs else "")


def apply(
    plan: Plan, family: ModelFamily, model: LoadedModel, transfer: DeviceTransfer, *, pin: bool, again: bool = False
) -> Offload | None:
    """Apply a plan to a model. Its weights may already be on the device. For the arguments see ``MemoryManager``."""
    memory = MemoryManager(StepRequirements(), False, None, plan=plan)
    model.placement = memory.placement(family, model, transfer, pin)
    memory.apply(family, model, again)
    return memory.offload


def reset_peak(device: torch.device) -> None:
    """Restart the measurement that ``peak_bytes`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of tensors since the last call of ``reset_peak``; 0 on the CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0
