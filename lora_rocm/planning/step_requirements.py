"""Requirements of a recipe on its step, and the change of the recipe to suggest if no plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lora_rocm.errors import UserError
from lora_rocm.foundation.units import count_text, size_text
from lora_rocm.hardware.settings import Settings
from lora_rocm.planning.step_choice import choose, smallest
from lora_rocm.planning.step_plan import (
    MODES,
    Footprint,
    Mode,
    Plan,
    Rates,
    SmallerAdapter,
    StepRequirements,
    without_main_memory,
)
from lora_rocm.recipe.schema import Recipe

RECOMPUTED: tuple[Mode, ...] = ("attention", "recompute", "inputs", "offload")
"""Modes that recompute all blocks."""
LEAST: tuple[Mode, ...] = ("recompute", "inputs", "offload")
"""Modes that recompute all of all blocks. Only these are left once memory has run out."""
UNKEPT_ATTENTION = ("math", "flash", "aiter")
"""Settings of attention with an output that is always recomputed. Plain attention's backward pass needs all scores."""
COMPILES = ("regional", "full")  # of runtime.compile: compiled code cannot follow weights that move
ADAPTER = ("adapter_bytes", "gradient_bytes", "landing_bytes")  # the adapter's part of a footprint
SMALLEST_RESOLUTION = 256
MAX_SIDES = 32  # resolutions to try, each of which costs one choice


@dataclass(frozen=True)
class RecipeJob(StepRequirements):
    """Requirements of a recipe on its step, with the modes that other settings would allow.

    Attributes:
        auto_modes: modes allowed with ``runtime.memory: auto``.
        eager_modes: modes allowed with ``runtime.memory: auto`` and ``runtime.compile: off``.
    """

    auto_modes: tuple[Mode, ...] = MODES
    eager_modes: tuple[Mode, ...] = MODES


def job_of(
    recipe: Recipe, settings: Settings, *, on_gpu: bool, can_offload: bool, shapes: int | None = None
) -> RecipeJob:
    """Return the requirements on a step that follow from the recipe and from past failures.

    Args:
        recipe: recipe of the run.
        settings: settings of the parent process for this machine, changed after failures.
        on_gpu: whether training runs on a GPU, so that passes may be captured.
        can_offload: whether the GPU has its own memory. A recipe that asks for offload gets it in any case.
        shapes: number of sample shapes, or None if unknown. It is then taken as 2 with buckets, else as 1.
    """
    wanted, train = recipe.runtime.memory, recipe.train
    at_least = LEAST if settings.checkpointing else RECOMPUTED if train.gradient_checkpointing else MODES
    compiles = recipe.runtime.compile in COMPILES
    if wanted == "inputs" and not can_offload:
        raise UserError(
            "inputs-share-memory",
            "This GPU shares its memory with the processor, so moving the inputs of blocks there would free nothing.",
            where="runtime.memory: inputs",
            fix="Set runtime.memory to auto.",
        )
    keeps_attention = not compiles and not settings.checkpointing and settings.attention not in UNKEPT_ATTENTION
    eager_modes = _allowed(MODES if can_offload else without_main_memory(MODES), at_least)
    compiled_modes = tuple(mode for mode in without_main_memory(MODES) if mode != "attention")
    auto_modes = _allowed(compiled_modes, at_least) if compiles else eager_modes
    return RecipeJob(
        batch_size=train.batch_size,
        accumulation=train.gradient_accumulation_steps,
        modes=auto_modes if wanted == "auto" else _allowed((wanted,), at_least),
        min_parts=min(settings.micro_batch_parts, train.batch_size),
        graphs=on_gpu and recipe.runtime.graphs == "auto" and settings.graphs and not recipe.lora.dropout,
        shapes=shapes or (2 if recipe.data.enable_bucket else 1),
        all_offloaded=wanted == "offload",
        keeps_attention=keeps_attention,
        unpacks_once=not compiles and not settings.checkpointing,
        looks_up_rows=on_gpu and can_offload and not compiles,
        auto_modes=auto_modes,
        eager_modes=eager_modes,
    )


def _allowed(modes: tuple[Mode, ...], at_least: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """Return the modes that recompute enough, or else the mode that recomputes all."""
    return tuple(mode for mode in modes if mode in at_least) or ("recompute",)


def does_not_fit(
    recipe: Recipe, footprint: Footprint, job: StepRequirements, rates: Rates, budget_bytes: int
) -> UserError:
    """Return the error for a recipe for which no plan fits.

    Its fix names the smallest change of the recipe with which a plan fits.
    """
    least = smallest(footprint, job, rates)
    return UserError(
        "does-not-fit",
        f"This recipe does not fit: it needs at least {size_text(least.needed_bytes)} "
        f"({plan_text(least)}), and {size_text(budget_bytes)} are available.",
        where=f"{_shown_resolution(recipe)}lora.rank: {recipe.lora.rank}, runtime.memory: {recipe.runtime.memory}",
        fix=_nearest(recipe, footprint, job, rates, budget_bytes),
    )


def _nearest(recipe: Recipe, footprint: Footprint, job: StepRequirements, rates: Rates, budget_bytes: int) -> str:
    """Return the smallest change of the recipe with which a plan fits, as text."""
    ways = _changes(recipe, job)

    def further_changes(side: int, adapter: SmallerAdapter | None) -> tuple[str, ...] | None:
        """Return the changes of ``runtime`` that are needed too, or None if no plan fits with any of them."""
        reduced = _reduced(recipe, footprint, side, adapter)
        return next((texts for texts, way in ways if choose(budget_bytes, reduced, way, rates) is not None), None)

    fits = lambda side, adapter: further_changes(side, adapter) is not None  # noqa: E731
    for side, adapter in _milder_first(recipe, footprint.smaller, fits):
        more = further_changes(side, adapter)
        if more is not None:
            resized = [f"{_resolution_key(recipe)} to {side}"] if side != _resolution(recipe) else []
            slimmed = [adapter.setting] if adapter is not None else []
            return f"Set {_listed([*resized, *slimmed, *more])}: that would fit."
    if not recipe.spec.reads("data.resolution"):
        return "Free memory of the GPU, or use a smaller model: no rank would fit."
    least = min(SMALLEST_RESOLUTION, _resolution(recipe))
    return f"Free memory of the GPU, or use a smaller model: no rank would fit, at any resolution from {least} on."


def _changes(recipe: Recipe, job: StepRequirements) -> list[tuple[tuple[str, ...], StepRequirements]]:
    """Return possible changes of ``runtime`` as text, each with the resulting requirements.

    The first changes nothing.
    """
    found: list[tuple[tuple[str, ...], StepRequirements]] = [((), job)]
    if isinstance(job, RecipeJob):
        auto = () if recipe.runtime.memory == "auto" else ("runtime.memory to auto",)
        if auto:
            found.append((auto, replace(job, modes=job.auto_modes, all_offloaded=False)))
        if job.eager_modes != job.auto_modes:
            eager = replace(job, modes=job.eager_modes, all_offloaded=False)
            found.append(((*auto, "runtime.compile to off"), eager))
    return found


def _milder_first(
    recipe: Recipe, smaller: Sequence[SmallerAdapter], fits: Callable[[int, SmallerAdapter], bool]
) -> Iterator[tuple[int, SmallerAdapter | None]]:
    """Yield resolutions and adapters to try, the smallest change first: the recipe's own, then one reduced, then both.

    An adapter of None is the recipe's own.

    Args:
        recipe: the recipe.
        smaller: smaller adapters, the smallest change first.
        fits: whether a plan fits. An adapter that does not fit at the smallest resolution is skipped.
    """
    own_side, step = _resolution(recipe), recipe.data.bucket_step
    step *= max(1, (own_side - SMALLEST_RESOLUTION) // (MAX_SIDES * step))
    sides = list(range(own_side - step, SMALLEST_RESOLUTION, -step))
    sides += [SMALLEST_RESOLUTION] if own_side > SMALLEST_RESOLUTION else []
    sides = sides if recipe.spec.reads("data.resolution") else []
    yield own_side, None
    yield from ((side, None) for side in sides)
    yield from ((own_side, adapter) for adapter in smaller)
    for adapter in smaller:
        if sides and fits(sides[-1], adapter):
            yield from ((side, adapter) for side in sides)


def _reduced(recipe: Recipe, footprint: Footprint, side: int, adapter: SmallerAdapter | None) -> Footprint:
    share = (side / _resolution(recipe)) ** 2
    smaller = footprint.scaled(share) if share != 1 else footprint
    return smaller if adapter is None else smaller.with_adapter(adapter)


def _listed(texts: Sequence[str]) -> str:
    """Join texts for a sentence, as in "a, b and c"."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _resolution(recipe: Recipe) -> int:
    """Return the largest resolution of all sources, for which the footprint is counted."""
    return max(source.resolution for source in recipe.data.resolved_sources())


def _shown_resolution(recipe: Recipe) -> str:
    """Return the resolution's key and value, for the place in an error; empty if the family has no resolution."""
    return f"{_resolution_key(recipe)}: {_resolution(recipe)}, " if recipe.spec.reads("data.resolution") else ""


def _resolution_key(recipe: Recipe) -> str:
    own = any(source.resolution is not None for source in recipe.data.sources)
    return "the resolution of every source in data.sources" if own else "data.resolution"


def plan_text(chosen: Plan) -> str:
    """Return a plan as text, such as "selective (12 blocks recomputed), 2 samples at once"."""
    count = len(chosen.recomputed)
    more = f", {len(chosen.attention)} of them without attention" if chosen.attention else ""
    more += ", their inputs in main memory" if chosen.offloads_inputs else ""
    more += f", {len(chosen.offloaded)} of them offloaded" if chosen.offloaded else ""
    blocks = f" ({count_text(count, 'block')} recomputed{more})" if count else ""
    samples = f"{count_text(chosen.rows, 'sample')} at once"
    samples += ", the token embedding in main memory" if chosen.looks_up_rows else ""
    return f"{chosen.mode}{blocks}, {samples}{', captured' if chosen.graphs else ''}"
