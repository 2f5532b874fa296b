"""The choices of each mode, the fastest first, and the choice of the fastest plan that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lora_rocm.planning.step_plan import (
    Footprint,
    Mode,
    Plan,
    Rates,
    StepChoice,
    StepRequirements,
    planned,
    seconds,
)

AMPLE_SHARE = 0.5
"""Share of a budget. If everything fits into it, a start measures neither the GPU's rates nor the memory of a pass."""


@dataclass(frozen=True)
class PassVariant:
    """The settings of a choice that do not depend on the blocks, and whether passes are captured as graphs."""

    graphs: bool
    offloads_inputs: bool
    unpacks_once: bool
    looks_up_rows: bool = False

    @property
    def settings(self) -> tuple[bool, bool, bool]:
        """The last settings of a ``StepChoice``."""
        return self.offloads_inputs, self.unpacks_once, self.looks_up_rows


class PlanMemory:
    """The plans of a recipe. Each is computed once, also if several amounts of memory are asked for.

    Args:
        footprint, job, rates: see ``step_plan.planned``.
    """

    def __init__(self, footprint: Footprint, job: StepRequirements, rates: Rates) -> None:
        self._footprint, self._job, self._rates = footprint, job, rates
        self._known: dict[tuple[Mode, int, PassVariant], tuple[list[Plan], Iterator[Plan]]] = {}

    def choose(self, budget_bytes: int | None) -> Plan | None:
        """Return the fastest plan within the budget, or None if no plan fits.

        ``budget_bytes``: the available memory, or None for no limit.
        """
        limit = float("inf") if budget_bytes is None else budget_bytes
        found = [self.fit(limit, mode, parts) for parts in parts_of(self._job) for mode in self._job.modes]
        fitting = [plan for plan in found if plan is not None]
        return min(fitting, key=lambda plan: (plan.step_s, plan.needed_bytes), default=None)

    def smallest(self) -> Plan:
        """Return the plan that needs the least memory."""
        ways = [(mode, parts) for parts in parts_of(self._job) for mode in self._job.modes]
        plans = (plan for way in ways for plan in self.plans_of(*way))
        return min(plans, key=lambda plan: (plan.needed_bytes, plan.step_s))

    def fit(self, limit: float, mode: Mode, parts: int) -> Plan | None:
        """Return the fastest plan of a mode that needs at most ``limit`` bytes, or None if none fits."""
        found = []
        for variant in variants_of(mode, self._footprint, self._job):
            plans = self._of_variant(mode, parts, variant)
            found.append(next((plan for plan in plans if plan.needed_bytes <= limit), None))
        return min((plan for plan in found if plan is not None), key=lambda plan: plan.step_s, default=None)

    def plans_of(self, mode: Mode, parts: int) -> Iterator[Plan]:
        """Yield the plans of a mode by variant. Within a variant, each gives up more than the one before."""
        for variant in variants_of(mode, self._footprint, self._job):
            yield from self._of_variant(mode, parts, variant)

    def _of_variant(self, mode: Mode, parts: int, variant: PassVariant) -> Iterator[Plan]:
        key = (mode, parts, variant)
        if key not in self._known:
            self._known[key] = ([], self._computed(mode, parts, variant))
        known, rest = self._known[key]
        yield from known
        for plan in rest:
            known.append(plan)
            yield plan

    def _computed(self, mode: Mode, parts: int, variant: PassVariant) -> Iterator[Plan]:
        one = replace(self._job, graphs=variant.graphs)
        for choice in choices_of(mode, self._footprint, self._job, self._rates, variant):
            yield planned(mode, parts, choice, self._footprint, one, self._rates)


def choose(budget_bytes: int | None, footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan | None:
    """Return the fastest plan within the budget, or None if no plan fits. See ``PlanMemory.choose``."""
    return PlanMemory(footprint, job, rates).choose(budget_bytes)


def has_ample_room(budget_bytes: int | None, footprint: Footprint, job: StepRequirements) -> bool:
    """Whether everything can be kept in a part of the budget (``AMPLE_SHARE``). No other plan is faster, at any rates.

    The rest of the budget is for activations that the footprint lacks. If the budget is unknown (None), the room is not
    ample.
    """
    if budget_bytes is None or "keep" not in job.modes:
        return False
    [choice] = choices_of("keep", footprint, job, Rates(), PassVariant(job.graphs, False, False))
    needed_bytes = planned("keep", job.min_parts, choice, footprint, job, Rates()).needed_bytes
    return needed_bytes <= AMPLE_SHARE * budget_bytes


def smallest(footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan:
    """Return the plan that needs the least memory."""
    return PlanMemory(footprint, job, rates).smallest()


def with_embedding(plan: Plan, footprint: Footprint, job: StepRequirements, rates: Rates) -> Plan:
    """Return the plan with its token embedding on the GPU."""
    choice, one = replace(plan.choice, looks_up_rows=False), replace(job, graphs=plan.graphs)
    return planned(plan.mode, plan.parts, choice, footprint, one, rates)


def table(budget_bytes: int | None, footprint: Footprint, job: StepRequirements, rates: Rates) -> list[Plan]:
    """Return, for each number of parts and each mode, the fastest plan that fits, or else the smallest plan."""
    limit, plans = float("inf") if budget_bytes is None else budget_bytes, PlanMemory(footprint, job, rates)
    return [
        plans.fit(limit, mode, parts) or min(plans.plans_of(mode, parts), key=lambda plan: plan.needed_bytes)
        for parts in parts_of(job)
        for mode in job.modes
    ]


def plans_of(mode: Mode, parts: int, footprint: Footprint, job: StepRequirements, rates: Rates) -> Iterator[Plan]:
    """Yield the plans of a mode by variant. Within a variant, each gives up more than the one before."""
    return PlanMemory(footprint, job, rates).plans_of(mode, parts)


def parts_of(job: StepRequirements) -> list[int]:
    """Return the numbers of parts to try: ``min_parts``, doubled up to the batch size."""
    found = [job.min_parts]
    while found[-1] < job.batch_size:
        found.append(min(found[-1] * 2, job.batch_size))
    return found


def variants_of(mode: Mode, footprint: Footprint, job: StepRequirements) -> list[PassVariant]:
    """Return the variants of a mode's choices.

    If no mode but a recipe's own is allowed, inputs are moved only if the recipe asks for it.
    """
    has_inputs = any(block.input_bytes for block in footprint.blocks)
    has_packed = any(block.dense_bytes for block in footprint.blocks)
    moves = {"inputs": (True,), "selective": (False, True), "offload": (False, True)}.get(mode, (False,))
    if mode != "inputs" and not ("inputs" in job.modes and has_inputs):
        moves = (False,)
    once = (True, False) if job.unpacks_once and has_packed and mode != "keep" else (False,)
    captured = (True, False) if job.graphs else (False,)
    looking_up = (False, True) if job.looks_up_rows and footprint.table_bytes else (False,)
    return [PassVariant(*each) for each in product(captured, moves, once, looking_up)]


def choices_of(
    mode: Mode, footprint: Footprint, job: StepRequirements, rates: Rates, variant: PassVariant
) -> list[StepChoice]:
    """Return the choices of a mode, the fastest first. Each gives up more than the one before."""
    every, how = tuple(range(len(footprint.blocks))), variant.settings
    attention = [index for index in every if job.keeps_attention and footprint.blocks[index].attention_bytes]
    if mode == "keep":
        return [StepChoice((), (), (), *how)]
    if mode == "selective":
        return _selective(footprint, job, rates, how)
    if mode == "attention":
        return [StepChoice(every, (), tuple(attention), *how)]
    if mode == "recompute":
        return [StepChoice(every, (), (), *how)]
    if mode == "inputs":
        order = sorted(attention, key=lambda index: -_worth_of_attention(footprint, index, rates))
        return [StepChoice(every, (), tuple(sorted(order[count:])), *how) for count in range(len(order) + 1)]
    fewest = len(every) if job.all_offloaded else 1
    return [StepChoice(every, tuple(spread(count, len(every))), (), *how) for count in range(fewest, len(every) + 1)]


def _selective(footprint: Footprint, job: StepRequirements, rates: Rates, how: tuple[bool, ...]) -> list[StepChoice]:
    """Return choices that recompute more and more blocks, those first that free most bytes per second.

    A block first keeps the output of its attention. Where that is worth less than the rest of the block, the output is
    given up later, and where it is worth more, together with the rest.
    """
    steps: list[tuple[float, int, bool]] = []  # (worth, block, whether its attention is still kept)
    for index, worth in sorted(_worths(footprint, rates).items(), key=lambda pair: -pair[1]):
        block = footprint.blocks[index]
        if not (job.keeps_attention and block.attention_bytes):
            steps.append((worth, index, False))
            continue
        later = _worth_of_attention(footprint, index, rates)
        rest_s = seconds(block.forward, 1, 1, rates) - seconds(block.attention, 1, 1, rates)
        first = (block.kept_bytes - block.attention_bytes) / max(1e-12, rest_s)
        if first > later and block.kept_bytes > block.attention_bytes:
            steps += [(first, index, True), (later, index, False)]
        else:
            steps.append((worth, index, False))
    found, recomputed, attention = [], set[int](), set[int]()
    for _, index, keeps in sorted(steps, key=lambda step: -step[0]):
        recomputed.add(index)
        if keeps:
            attention.add(index)
        else:
            attention.discard(index)
        found.append(StepChoice(tuple(sorted(recomputed)), (), tuple(sorted(attention)), *how))
    return found[:-1] if len(found) > 1 else found or [StepChoice((), (), (), *how)]


def _worths(footprint: Footprint, rates: Rates) -> dict[int, float]:
    """Bytes that recomputing a block frees per second of its recomputation, for blocks with kept activations."""
    return {
        index: block.kept_bytes / max(1e-12, seconds(block.forward, 1, 1, rates))
        for index, block in enumerate(footprint.blocks)
        if block.kept_bytes > 0
    }


def _worth_of_attention(footprint: Footprint, index: int, rates: Rates) -> float:
    block = footprint.blocks[index]
    return block.attention_bytes / max(1e-12, seconds(block.attention, 1, 1, rates))


def by_worth(footprint: Footprint, rates: Rates) -> list[int]:
    """Return the indices of blocks with kept activations, the most bytes freed per second of recomputation first."""
    worths = _worths(footprint, rates)
    return sorted(worths, key=lambda index: -worths[index])


def spread(count: int, total: int) -> list[int]:
    """Return ``count`` of ``total`` block indices, evenly spread, so that other blocks compute between two fetches.

    A larger choice includes every smaller one.
    """
    bits = max(1, (total - 1).bit_length())
    order = sorted(range(total), key=lambda index: int(f"{index:0{bits}b}"[::-1], 2))
    return sorted(order[:count])
