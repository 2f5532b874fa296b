"""``lora-rocm plan``: predict memory and time of a recipe with each memory plan, without loading the model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lora_rocm.commands.next_command import train_command
from lora_rocm.commands.output import Failure
from lora_rocm.dataset.images.same_sizes import alike_squares
from lora_rocm.errors import UserError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.families.spec import Fp16
from lora_rocm.foundation.units import count_text, size_text, time_text
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.eight_bit import rate_of, target_of
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.memory_budget import (
    DESKTOP,
    GIB,
    HELD,
    OF_CARD,
    BudgetItem,
    MemoryBudget,
    card_budget,
    desktop_bytes,
    parts_text,
)
from lora_rocm.planning.format_errors import loss_text, weights_text, whole_text
from lora_rocm.planning.step_choice import choose, table, with_embedding
from lora_rocm.planning.step_plan import CONTEXT_BYTES, MODES, Footprint, Plan, Rates, SampleCost, without_main_memory
from lora_rocm.planning.step_requirements import ADAPTER, RecipeJob, does_not_fit, job_of, plan_text
from lora_rocm.processes.jobs import Counted, CountedGpu, PlanJob, QuantisedEncoder
from lora_rocm.processes.tool import ask
from lora_rocm.recipe.eight_bit import products_text
from lora_rocm.recipe.load import LoadedRecipe, load_recipe  # recipe: the user names it
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.eight_bit_refusal import eight_bit_refusal, eight_bit_text
from lora_rocm.rules.environment import plan as environment_plan
from lora_rocm.rules.memory_rules import budget_of, memory_table
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rules.tuned_rules import attention_text

PUBLISHED = "counted with the published configuration of the family's first model, which all its fine-tunes share"
COUNTED = ("shape", "weight_bytes", *ADAPTER, "optimizer_bytes", "work")
CARD = re.compile(r"(\d+(?:\.\d+)?)\s*(?:G|GB|GiB)?", re.IGNORECASE)
LARGEST_CARD_GIB = 4096
PRECISION_ERROR = {"fp16": 0.002, "bf16": 0.018}
"""Relative error of a LoRA's gradients by number format, against float32 (``benchmarks/precision_error.py``)."""
FITS_FP16: dict[Fp16, str] = {
    "whole": "its activations fit fp16",
    "products": "products in fp16, the residual stream between them in float32: its sums exceed the range of fp16",
    "never": "factors of its products are too large for fp16",
}


@dataclass(frozen=True)
class AvailableMemory:
    """Memory available for tensors.

    Attributes:
        num_bytes: amount in bytes, or null if there is no limit to compare with.
        why: how the amount was computed, as text.
        shared: whether this is main memory, so that offloading weights saves nothing.
        parts: the amounts that add up to it, in bytes; a negative amount is subtracted.
    """

    num_bytes: int | None
    why: str
    shared: bool = False
    parts: tuple[BudgetItem, ...] = ()


@dataclass(frozen=True)
class CountedFootprint:
    """Memory and work of the recipe at its largest samples; see ``planning.step_plan.Footprint``.

    Attributes:
        blocks: number of repeated blocks.
        shape: shape of the largest samples.
        weight_bytes: memory of the frozen weights.
        adapter_bytes: memory of the trained weights, their gradients, moments and average.
        gradient_bytes: memory of the buffer that accumulates gradients.
        landing_bytes: memory of the staging buffer for gradients.
        optimizer_bytes: memory of the optimizer's state, which is part of ``adapter_bytes``.
        work: work of one sample.
    """

    blocks: int
    shape: str
    weight_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    landing_bytes: int
    optimizer_bytes: int
    work: SampleCost


@dataclass(frozen=True)
class PlanResult:
    """Result of ``lora-rocm plan``.

    Attributes:
        recipe: name of the recipe.
        model: path or name of the model.
        batch_size: samples per micro-batch.
        gradient_accumulation_steps: micro-batches per step.
        rank: rank of the adapter.
        optimizer: name of the optimizer.
        memory: ``runtime.memory``.
        gradient_checkpointing: ``train.gradient_checkpointing``.
        max_train_steps: ``train.max_train_steps``.
        precision: number format of the computation; "no" is float32.
        footprint: memory and work at the largest samples.
        room: memory available for tensors.
        plans: for each mode and number of parts, the fastest plan that fits, or else the smallest plan.
        chosen: the plan that training would use, or null if none fits.
        with_embedding_bytes: memory that this plan would need with the token embedding on the GPU; null if it is there.
        seconds_are_known: whether the times are for this machine's GPU. If not, only their ratios are meaningful.
        rates: the rates from which the times are computed.
        attention: backend of attention.
        encoders: the quantised text encoders.
        model_is_here: whether the model is on this machine. If not, its published configuration is used.
        notes: consequences of the recipe.
        remarks: remarks about number formats, texts and encoders.
        error: why no plan fits, or null if one fits or there is no limit to compare with.
        next: the command that trains, or null if no plan fits.
    """

    recipe: str
    model: str
    batch_size: int
    gradient_accumulation_steps: int
    rank: int
    optimizer: str
    memory: str
    gradient_checkpointing: bool
    max_train_steps: int | None
    precision: str
    footprint: CountedFootprint
    room: AvailableMemory
    plans: tuple[Plan, ...]
    chosen: Plan | None
    with_embedding_bytes: int | None
    seconds_are_known: bool
    rates: Rates
    attention: str
    encoders: tuple[QuantisedEncoder, ...]
    model_is_here: bool
    notes: tuple[str, ...]
    remarks: tuple[str, ...]
    error: Failure | None
    next: str | None


def plan(
    recipe_path: str, overrides: Sequence[str] = (), *, card: str | None = None, registry: FamilyRegistry = FAMILIES
) -> PlanResult:
    """Estimate memory and time of each memory plan, and choose one as training would.

    Args:
        recipe_path: path or name of the recipe. Its model is not downloaded, and its images are not read.
        overrides: ``section.key=value`` settings.
        card: memory of a GPU such as "24GB", or None for this machine's GPU.
        registry: the available families.

    Raises:
        LoraRocmError: recipe or model are wrong. If no plan fits, the result has an ``error`` and nothing is raised.
    """
    found = planned(load_recipe(recipe_path, overrides, registry), card)
    return found if found.error is not None else replace(found, next=train_command(recipe_path, overrides))


def planned(loaded: LoadedRecipe, card: str | None = None) -> PlanResult:
    """Return the result of ``plan`` for a loaded recipe, without the next command.

    Raises:
        LoraRocmError: see ``plan``.
    """
    # Count the model and the available memory
    recipe = loaded.recipe
    found = estimate(recipe, card)
    counted, footprint, room, rates, job = found.counted, found.footprint, found.room, found.rates, found.job
    # Choose a plan
    chosen = choose(room.num_bytes, footprint, job, rates)
    moved = chosen if chosen is not None and chosen.looks_up_rows else None
    modes = without_main_memory(MODES) if room.shared else MODES
    rows = table(room.num_bytes, footprint, replace(job, modes=modes), rates)
    unfit = chosen is None and room.num_bytes is not None
    encoders = tuple(counted.encoders)
    gpu_here = found.situation.gpu if card is None else None
    return PlanResult(
        loaded.name,
        recipe.model.name_or_path,
        recipe.train.batch_size,
        recipe.train.gradient_accumulation_steps,
        recipe.lora.rank,
        recipe.optim.optimizer,
        recipe.runtime.memory,
        recipe.train.gradient_checkpointing,
        recipe.train.max_train_steps,
        counted.precision,
        CountedFootprint(len(footprint.blocks), **{name: getattr(footprint, name) for name in COUNTED}),
        room,
        tuple(rows),
        chosen,
        None if moved is None else with_embedding(moved, footprint, job, rates).needed_bytes,
        rates.known,
        rates,
        attention_text(found.situation),
        encoders,
        counted.model_is_here,
        tuple(_notes(recipe, footprint, found.situation, card is not None)),
        tuple(_remarks(recipe, counted.precision, gpu_here, encoders)),
        Failure.of(does_not_fit(recipe, footprint, job, rates, room.num_bytes or 0)) if unfit else None,
        None,
    )


@dataclass(frozen=True)
class Estimate:
    """Memory, rates and requirements of a recipe, for a choice among its plans.

    Attributes:
        counted: the model's memory and work, as counted by the child process.
        footprint: the footprint in ``counted``.
        room: memory available for tensors.
        rates: rates of this machine's GPU, or usual rates.
        job: requirements of the recipe.
        situation: facts about this machine.
    """

    counted: Counted
    footprint: Footprint
    room: AvailableMemory
    rates: Rates
    job: RecipeJob
    situation: Situation


Counting = Callable[[Recipe, Situation, bool], Counted]
"""Counts the memory of a recipe; the last argument is whether the user named a GPU."""


def counted_in_child(recipe: Recipe, situation: Situation, for_card: bool) -> Counted:
    """Count the memory of a recipe in a child process.

    Raises:
        LoraRocmError: the model is wrong.
    """
    env = {**environment_plan(situation).applied_to(os.environ), "HF_HUB_OFFLINE": "1"}
    job = PlanJob(recipe.model_dump(mode="json"), for_card=for_card, for_gpu=for_card or situation.gpu is not None)
    return ask(job, Counted, env)


def estimate(recipe: Recipe, card: str | None = None) -> Estimate:
    """Count the memory of a recipe in a child process, and find the available memory.

    Args:
        recipe: the recipe.
        card: memory of a GPU such as "24GB", or None for this machine's GPU.

    Raises:
        LoraRocmError: the model is wrong, or ``card`` is not an amount of memory.
    """
    total = None if card is None else card_bytes(card)
    situation = situation_here(recipe)
    counted = counted_in_child(recipe, situation, card is not None)
    gpu = counted.gpu
    if total is not None:
        return _estimate(recipe, counted, situation, _room_of_card(total), _usual_rates(recipe, None), on_gpu=True)
    rates = gpu.rates if gpu is not None else _usual_rates(recipe, situation.gpu)
    return _estimate(recipe, counted, situation, _room_here(situation, gpu), rates, on_gpu=gpu is not None)


def estimates_unmeasured(
    recipe: Recipe, cards: Sequence[str], counting: Counting = counted_in_child
) -> list[tuple[str | None, Estimate]]:
    """Count the memory of a recipe once, for several GPUs. No GPU is used, so that a run on it is not disturbed.

    Args:
        recipe: the recipe.
        cards: memory of each GPU, such as "24GB".
        counting: counts the recipe, or knows its count.

    Returns:
        Each card with its estimate. If the system names a GPU of this machine, it comes first as None.

    Raises:
        LoraRocmError: the model is wrong, or a card is not an amount of memory.
    """
    totals = [(card, card_bytes(card)) for card in cards]
    situation = situation_here(recipe)
    counted = counting(recipe, situation, True)
    rooms: list[tuple[str | None, AvailableMemory]] = [(card, _room_of_card(total)) for card, total in totals]
    if situation.gpu is not None:
        rooms.insert(0, (None, _room_here(situation, None)))
    return [
        (card, _estimate(recipe, counted, situation, room, _usual_rates(recipe, gpu), on_gpu=True))
        for card, room in rooms
        for gpu in [situation.gpu if card is None else None]
    ]


def _usual_rates(recipe: Recipe, gpu: Gpu | None) -> Rates:
    """Return rates that were not measured, for a GPU or, with None, for any."""
    return Rates(eight_bit_flops=Rates.flops * rate_of(target_of(gpu), recipe.model.compute).times)


def _estimate(
    recipe: Recipe, counted: Counted, situation: Situation, room: AvailableMemory, rates: Rates, *, on_gpu: bool
) -> Estimate:
    settings = environment_plan(situation).settings
    job = job_of(recipe, settings, on_gpu=on_gpu, can_offload=not room.shared)
    return Estimate(counted, Footprint.from_json(counted.footprint), room, rates, job, situation)


def card_bytes(text: str) -> int:
    """Return an amount of GPU memory such as "24GB" in bytes. For GPUs, GB means GiB.

    Raises:
        UserError: the text is not an amount of memory.
    """
    found = CARD.fullmatch(text.strip())
    amount = float(found.group(1)) if found is not None else 0.0
    if not 0 < amount <= LARGEST_CARD_GIB:
        raise UserError(
            "card-unclear", "This is not a memory size.", where=f"--card {text!a:.40}", fix="For example --card 24GB."
        )
    return int(amount * GIB)


def _room_of_card(total_bytes: int) -> AvailableMemory:
    """Return the memory for tensors on a GPU of this size that also shows a desktop."""
    card, desktop = BudgetItem(OF_CARD, total_bytes), BudgetItem(DESKTOP, -desktop_bytes(total_bytes))
    found = card_budget(card, desktop, memory_table().reserves, is_linux=True, shows=True)
    return AvailableMemory(found.total_bytes, parts_text(found.parts), parts=found.parts)


def _room_here(situation: Situation, gpu: CountedGpu | None) -> AvailableMemory:
    """Return the memory that the worker would have. If torch sees no GPU, estimate it from the system's information."""
    known = budget_of(situation.facts, situation.gpu)
    if gpu is not None:
        parts = _parts_of(known, gpu.budget_bytes)
        counted = f": {parts_text(parts)}" if parts else ""
        return AvailableMemory(gpu.budget_bytes, f"{gpu.name}, as training sees it{counted}", gpu.integrated, parts)
    if known is None or situation.gpu is None:
        return AvailableMemory(None, "there is no usable GPU here; --card 24GB shows whether the recipe fits a card")
    if not known.capped:  # the runtime's own memory is not subtracted yet
        return AvailableMemory(max(0, known.total_bytes - CONTEXT_BYTES), known.why)
    return AvailableMemory(known.total_bytes, parts_text(known.parts), bool(situation.gpu.integrated), known.parts)


def _parts_of(known: MemoryBudget | None, budget_bytes: int) -> tuple[BudgetItem, ...]:
    """Return the amounts from which the memory budget measured by the worker is derived; empty if they are unknown.

    Memory that remains after the budget, the libraries and the reserve is counted as used by other programs.
    """
    if known is None or not known.library_bytes:
        return known.parts if known is not None and known.capped else ()
    rest = [part for part in known.parts if part.name not in (HELD, DESKTOP)]
    held = budget_bytes - sum(part.num_bytes for part in rest)
    name = DESKTOP if any(part.name == DESKTOP for part in known.parts) else HELD
    return (rest[0], *([BudgetItem(name, held)] if held < 0 else ()), *rest[1:])


def _notes(recipe: Recipe, footprint: Footprint, situation: Situation, for_card: bool) -> Iterator[str]:
    """Yield sentences about the consequences of the recipe. ``for_card``: whether the user named a GPU."""
    for source in {source.index: source for source in recipe.data.resolved_sources()}.values():
        if source.class_prompt is not None:
            yield f"before training: {source.num_class_images} {source.name}, unless they are in the cache"
    yield from alike_squares(recipe.data) if recipe.spec.reads("data.resolution") else ()
    if recipe.model.quantization != "none":
        form, spec = recipe.model.quantization, recipe.spec
        yield f"model.quantization: {weights_text(form)}; {loss_text(form)}"
        yield whole_text(form, spec.name, spec.title)
    if text := eight_bit_text(situation):
        yield text
        yield products_text(recipe.spec.name, recipe.spec.title, recipe.model.compute)
        gpu = None if for_card else situation.gpu
        if for_card or (gpu is not None and eight_bit_refusal(situation) is None):
            yield rate_of(target_of(gpu), recipe.model.compute).text(None if gpu is None else gpu.name)
    if footprint.narrow_layers:
        yield (
            "lora.rank is larger than the inputs or outputs of "
            f"{count_text(footprint.narrow_layers, 'adapted layer')}: a lower rank can have the same effect there"
        )
    if text := recipe.lora.unstarted_text(footprint.unstarted_layers):
        yield text


def render(result: PlanResult) -> str:
    """Return the result as text."""
    return "\n".join(_lines(result))


def _lines(result: PlanResult) -> Iterator[str]:
    # model and memory
    footprint, room = result.footprint, result.room
    yield (
        f"{result.recipe}: {footprint.shape}, batch {result.batch_size} x {result.gradient_accumulation_steps}, "
        f"rank {result.rank}, {'float32' if result.precision == 'no' else result.precision}"
    )
    adapter = size_text(sum(getattr(footprint, name) for name in ADAPTER))
    state = f"{result.optimizer} keeps {size_text(footprint.optimizer_bytes)}"
    yield f"weights {size_text(footprint.weight_bytes)}, adapter and optimizer {adapter} ({state})"
    yield from result.notes
    yield room.why if room.num_bytes is None else f"memory for training: {size_text(room.num_bytes)} ({room.why})"
    yield ""
    # table of all plans
    blocks = f"{'recomputed':>11}{'attention':>11}{'inputs':>8}{'offloaded':>11}"
    yield f"{'memory':<10}{blocks}{'at once':>9}{'graphs':>8}{'peak':>11}{'step':>10}  fits"
    fastest = min(row.step_s for row in result.plans)
    for row in result.plans:
        seconds = f"{row.step_s:.3f} s" if result.seconds_are_known else f"{row.step_s / fastest:.2f} x"
        fits = "" if room.num_bytes is None else "yes" if row.needed_bytes <= room.num_bytes else "no"
        mark = "  <- chosen" if row == result.chosen else ""
        graphs, peak = "yes" if row.graphs else "no", size_text(row.peak_bytes)
        inputs = "moved" if row.offloads_inputs else "here"
        blocks = f"{len(row.recomputed):>11}{len(row.attention):>11}{inputs:>8}{len(row.offloaded):>11}"
        yield f"{row.mode:<10}{blocks}{row.rows:>9}{graphs:>8}{peak:>11}{seconds:>10}  {fits}{mark}".rstrip()
    yield ""
    # the chosen plan
    if result.chosen is not None:
        why = ", because of train.gradient_checkpointing: true" if result.gradient_checkpointing else ""
        yield f"runtime.memory: {result.memory} would choose: {plan_text(result.chosen)}{why}"
        yield from _reasons(result, result.chosen)
        if result.seconds_are_known and (steps := result.max_train_steps):
            yield f"{count_text(steps, 'step')}: about {time_text(result.chosen.step_s * steps)}"
    if not result.seconds_are_known:
        yield "times are relative to the fastest: no GPU was measured"
    yield from result.remarks
    yield f"attention: {result.attention}"
    if not result.model_is_here:
        yield f"{result.model} is not on this machine: {PUBLISHED}"
    if result.next is not None:
        yield f"next: {result.next}"


def _reasons(result: PlanResult, chosen: Plan) -> Iterator[str]:
    """Yield the reasons for a plan: the least memory for a faster one, the time of the next, and the measured rates."""
    available = result.room.num_bytes
    too_large = [row for row in result.plans if available is not None and row.needed_bytes > available]
    faster_rows = (row for row in too_large if row.step_s < chosen.step_s)
    faster = min(faster_rows, key=lambda row: (row.needed_bytes, row.step_s), default=None)
    if faster is not None:
        yield f"reason: {_named(faster)} would be faster, but needs {size_text(faster.needed_bytes)}"
    if result.with_embedding_bytes is not None:
        needed = size_text(result.with_embedding_bytes)
        yield f"reason: with the token embedding on the GPU, this plan would be faster, but needs {needed}"
    others = [row for row in result.plans if row not in too_large and not row.same(chosen)]
    if others:
        second = min(others, key=lambda row: (row.step_s, row.needed_bytes))
        yield f"next best: {_named(second)}, {second.step_s / chosen.step_s:.2f} times the time"
    if chosen.unpacks_once:
        yield "packed weights are unpacked once for a block's recomputation and backward pass"
    if result.seconds_are_known:
        rates = result.rates
        yield (
            f"measured: products {rates.flops / 1e12:.0f}, attention {rates.attention_flops / 1e12:.0f} TFLOP/s, "
            f"GPU memory {rates.moved_bytes / 1e9:.0f} GB/s, from main memory {rates.bus_bytes / 1e9:.0f} GB/s, "
            f"to it {rates.back_bytes / 1e9:.0f} GB/s"
        )


def _named(row: Plan) -> str:
    return f"{row.mode} with {count_text(row.rows, 'sample')} at once{'' if row.graphs else ', not captured'}"


def _remarks(recipe: Recipe, precision: str, gpu: Gpu | None, encoders: Sequence[QuantisedEncoder]) -> Iterator[str]:
    """Yield remarks about the number format, texts and text encoders."""
    if precision in PRECISION_ERROR:
        arch = arch_of(gpu.gfx) if gpu is not None else None
        emulates = arch is not None and not arch.bf16
        why = [f"{arch.gfx} computes bf16 slowly"] if arch is not None and emulates else []
        if emulates or precision == "fp16":
            why.append(f"{recipe.spec.title}: {FITS_FP16[recipe.spec.fp16]}")
        reasons = f" ({'; '.join(why)})" if why else ""
        yield f"train.mixed_precision: {recipe.train.mixed_precision} is {precision}{reasons}"
        share = 100 * PRECISION_ERROR[precision]
        yield f"{precision} changes the gradients by up to about {share:.1f} % of their size"
    elif recipe.train.mixed_precision == "auto":
        yield "train.mixed_precision: auto means no (float32), because this machine would train on the CPU"
    if recipe.spec.trains_on_texts:
        of_full = "rows are full" if recipe.data.packing else "rows may be shorter"
        yield f"the texts were not read: data.max_length is counted, and {of_full}; lora-rocm check counts tokens"
    for each in encoders:
        taken, dense = size_text(each.weight_bytes), size_text(each.dense_bytes)
        yield f"{each.component} takes {taken} while captions are encoded ({dense} dense); {weights_text(each.format)}"
