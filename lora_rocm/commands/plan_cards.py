"""Memory and relative time of a recipe on several GPUs, counted once, without using a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_rocm.commands.plan import Counting, counted_in_child, estimates_unmeasured
from lora_rocm.planning.step_choice import PlanMemory
from lora_rocm.planning.step_plan import Plan
from lora_rocm.planning.step_requirements import RecipeJob, plan_text
from lora_rocm.recipe.schema import Recipe


@dataclass(frozen=True)
class CardPlan:
    """The plan of a recipe for one GPU.

    Attributes:
        card: its memory, such as "24GB"; None for the GPU of this machine.
        room_bytes: memory available for tensors, or None if it is not known.
        why: how this amount was computed, as text.
        needed_bytes: memory that the chosen plan needs, or the smallest plan if none fits.
        chosen: the plan that training would use as text; empty if none fits.
        slowness: time of a step, as a multiple of the fastest plan of all GPUs; None if no plan fits.
    """

    card: str | None
    room_bytes: int | None
    why: str
    needed_bytes: int
    chosen: str
    slowness: float | None

    @property
    def fits(self) -> bool:
        return self.slowness is not None


def plan_cards(recipe: Recipe, cards: Sequence[str], counting: Counting = counted_in_child) -> tuple[CardPlan, ...]:
    """Choose a plan for each GPU as training would.

    Args:
        recipe: the recipe. Its model is not downloaded, and its images are not read.
        cards: memory of each GPU, such as "24GB". The GPU of this machine comes first, if there is one.
        counting: counts the recipe, or knows its count.

    Raises:
        LoraRocmError: the model is wrong.
    """
    found = []
    known: list[tuple[RecipeJob, PlanMemory]] = []  # all cards have the same plans, unless one shares main memory
    for card, each in estimates_unmeasured(recipe, cards, counting):
        plans = next((plans for job, plans in known if job == each.job), None)
        if plans is None:
            plans = PlanMemory(each.footprint, each.job, each.rates)
            known.append((each.job, plans))
        chosen = plans.choose(each.room.num_bytes)
        found.append((card, each, chosen, (chosen or plans.smallest()).needed_bytes))
    times = [chosen.step_s for _, _, chosen, _ in found if chosen is not None]
    return tuple(
        CardPlan(
            card,
            each.room.num_bytes,
            each.room.why,
            needed_bytes,
            "" if chosen is None else plan_text(chosen),
            None if chosen is None else _ratio(chosen, times),
        )
        for card, each, chosen, needed_bytes in found
    )


def _ratio(chosen: Plan, times: Sequence[float]) -> float:
    return chosen.step_s / min(times) if min(times) else 1.0
