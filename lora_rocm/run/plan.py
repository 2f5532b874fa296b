"""``lora-rocm plan``: what a recipe takes in memory and time, by what is kept, before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lora_rocm.errors import UserError
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.host.environ import plan as environment_plan
from lora_rocm.host.files import write_json
from lora_rocm.host.here import situation_here
from lora_rocm.host.memory import DISPLAY_MAX_BYTES, DISPLAY_MIN_BYTES, DISPLAY_SHARE, GIB, budget
from lora_rocm.host.printable import legible
from lora_rocm.host.quirks import Situation
from lora_rocm.host.settings import Settings
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.run.children import run_for_json
from lora_rocm.run.memory_plan import (
    CONTEXT_BYTES,
    MODES,
    Footprint,
    Job,
    Mode,
    Plan,
    Rates,
    SmallerAdapter,
    choose,
    smallest,
    table,
)
from lora_rocm.run.wording import size_text, time_text

MODULE = "lora_rocm.train.footprint"
AT_LEAST_RECOMPUTED: tuple[Mode, ...] = ("recompute", "offload")
COMPILES = ("regional", "full")  # of runtime.compile: compiled parts cannot follow weights that move
ADAPTER = ("adapter_bytes", "gradient_bytes", "landing_bytes")  # of a footprint, what the adapter takes
SMALLEST_RESOLUTION = 256
MAX_SIDES = 32  # that are tried: each is as long as a choice takes
PUBLISHED = "counted by the configuration that the family's first model has published, as all of its fine-tunes have it"
CARD = re.compile(r"(\d+(?:\.\d+)?)\s*(?:G|GB|GiB)?", re.IGNORECASE)
LARGEST_CARD_GIB = 4096


@dataclass(frozen=True)
class Room:
    """How much memory there is for tensors. num_bytes: None where there is no limit to compare with."""

    num_bytes: int | None
    why: str
    shared: bool = False
    """It is main memory: nothing is won by letting weights wait there."""


@dataclass(frozen=True)
class RecipeJob(Job):
    """A job with the modes that it would have if the recipe asked for something else.

    Attributes:
        auto_modes: with ``runtime.memory: auto``.
        eager_modes: with ``runtime.compile: off`` besides.
    """

    auto_modes: tuple[Mode, ...] = MODES
    eager_modes: tuple[Mode, ...] = MODES


def plan(
    recipe_path: str, overrides: Sequence[str], *, card: str | None, as_json: bool, registry: Registry = PRODUCT
) -> int:
    """Print what each way of computing a step takes, and the one that training would choose.

    Args:
        recipe_path: nothing is downloaded for its model; its pictures are not looked at.
        overrides: ``section.key=value``.
        card: memory of a card, as "24GB"; None: this machine's GPU.
        as_json: print one object.
        registry: the families there are.

    Raises:
        LoraRocmError: recipe or model are wrong; ``does-not-fit``, after the table.
    """
    loaded = load_recipe(recipe_path, overrides, registry)
    recipe = loaded.recipe
    total = None if card is None else card_bytes(card)
    situation = situation_here(recipe)
    counted = _counted(recipe, situation, total is not None)
    footprint, gpu = Footprint.from_json(counted["footprint"]), counted["gpu"]
    room = _room_of_card(total) if total is not None else _room_here(situation, gpu)
    rates = Rates(**gpu["rates"]) if gpu is not None and total is None else Rates()
    on_gpu = total is not None or gpu is not None
    job = job_of(recipe, _settings(situation), on_gpu=on_gpu, can_offload=not room.shared)
    chosen = choose(room.num_bytes, footprint, job, rates)
    rows = table(room.num_bytes, footprint, replace(job, modes=MODES if not room.shared else MODES[:-1]), rates)
    if as_json:
        found = {"footprint": _facts(footprint), "room": asdict(room)}
        found |= {name: counted[name] for name in ("precision", "model_is_here")}
        plans = {"plans": [asdict(row) for row in rows], "chosen": asdict(chosen) if chosen is not None else None}
        _say(json.dumps({**found, **plans, "seconds_are_known": rates.known}, indent=1))
    else:
        for line in _lines(loaded.name, recipe, counted["precision"], footprint, room, rows, chosen, rates):
            _say(legible(line))
        if not counted["model_is_here"]:
            _say(legible(f"{recipe.model.name_or_path} is not on this machine: {PUBLISHED}"))
    if chosen is None and room.num_bytes is not None:
        raise does_not_fit(recipe, footprint, job, rates, room.num_bytes)
    return 0


def job_of(
    recipe: Recipe, settings: Settings, *, on_gpu: bool, can_offload: bool, shapes: int | None = None
) -> RecipeJob:
    """What the recipe, and what past failures made necessary, ask of a step.

    Args:
        recipe: of the run.
        settings: what the parent planned for this machine.
        on_gpu: where passes may be captured.
        can_offload: main memory is another one than the GPU's; a recipe that asks for it gets it all the same.
        shapes: sizes of the pictures; None: not known, so several where the recipe has buckets.
    """
    wanted, train = recipe.runtime.memory, recipe.train
    recomputes = train.gradient_checkpointing or settings.checkpointing
    eager_modes = _allowed(MODES if can_offload else MODES[:-1], recomputes)
    auto_modes = _allowed(MODES[:-1], recomputes) if recipe.runtime.compile in COMPILES else eager_modes
    return RecipeJob(
        batch_size=train.batch_size,
        accumulation=train.gradient_accumulation_steps,
        modes=auto_modes if wanted == "auto" else _allowed((wanted,), recomputes),
        min_parts=min(settings.micro_batch_parts, train.batch_size),
        graphs=on_gpu and recipe.runtime.graphs == "auto" and settings.graphs and not recipe.lora.dropout,
        shapes=shapes or (2 if recipe.data.enable_bucket else 1),
        all_offloaded=wanted == "offload",
        auto_modes=auto_modes,
        eager_modes=eager_modes,
    )


def _allowed(modes: tuple[Mode, ...], recomputes: bool) -> tuple[Mode, ...]:
    """Those of the modes that do not keep what has to be recomputed."""
    if not recomputes:
        return modes
    return tuple(mode for mode in modes if mode in AT_LEAST_RECOMPUTED) or ("recompute",)


def does_not_fit(recipe: Recipe, footprint: Footprint, job: Job, rates: Rates, budget_bytes: int) -> UserError:
    """The error for a recipe that no plan fits, with the nearest that would."""
    least = smallest(footprint, job, rates)
    return UserError(
        "does-not-fit",
        f"This recipe does not fit: the least that it needs is {size_text(least.needed_bytes)} "
        f"({plan_text(least)}), and there is {size_text(budget_bytes)} for it.",
        where=f"{_resolution_key(recipe)}: {_resolution(recipe)}, lora.rank: {recipe.lora.rank}, "
        f"runtime.memory: {recipe.runtime.memory}",
        fix=_nearest(recipe, footprint, job, rates, budget_bytes),
    )


def _nearest(recipe: Recipe, footprint: Footprint, job: Job, rates: Rates, budget_bytes: int) -> str:
    """What to change, the mildest first. It is only said where there is a plan with it."""
    ways = _ways(recipe, job)

    def besides(side: int, adapter: SmallerAdapter | None) -> tuple[str, ...] | None:
        """What of ``runtime`` has to change as well; None: nothing of it would help."""
        reduced = _reduced(recipe, footprint, side, adapter)
        return next((texts for texts, way in ways if choose(budget_bytes, reduced, way, rates) is not None), None)

    fits = lambda side, adapter: besides(side, adapter) is not None  # noqa: E731
    for side, adapter in _milder_first(recipe, footprint.smaller, fits):
        more = besides(side, adapter)
        if more is not None:
            resized = [f"{_resolution_key(recipe)} to {side}"] if side != _resolution(recipe) else []
            slimmed = [adapter.setting] if adapter is not None else []
            return f"Set {_listed([*resized, *slimmed, *more])}: that would fit."
    least = min(SMALLEST_RESOLUTION, _resolution(recipe))
    return f"Free memory of the GPU, or take a smaller model: no rank would fit, at any resolution from {least} on."


def _ways(recipe: Recipe, job: Job) -> list[tuple[tuple[str, ...], Job]]:
    """Changes of ``runtime`` in words, none at first, and the job that each of them makes."""
    found: list[tuple[tuple[str, ...], Job]] = [((), job)]
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
    """Resolutions and adapters to try: the recipe's (None), then less of one of them, then of both, mildly.

    ``fits`` spares all resolutions with an adapter that not even the smallest of them would make small enough.
    """
    own_side, step = _resolution(recipe), recipe.data.bucket_step
    step *= max(1, (own_side - SMALLEST_RESOLUTION) // (MAX_SIDES * step))
    sides = list(range(own_side - step, SMALLEST_RESOLUTION, -step))
    sides += [SMALLEST_RESOLUTION] if own_side > SMALLEST_RESOLUTION else []
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
    """In a sentence: "a, b and c"."""
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _resolution(recipe: Recipe) -> int:
    """The largest of all sources, as that of a footprint."""
    return max(source.resolution for source in recipe.data.resolved_sources())


def _resolution_key(recipe: Recipe) -> str:
    own = any(source.resolution is not None for source in recipe.data.sources)
    return "the resolution of every source in data.sources" if own else "data.resolution"


def card_bytes(text: str) -> int:
    """Bytes of "24GB": a card's GB are GiB.

    Raises:
        UserError: it is no amount of memory.
    """
    found = CARD.fullmatch(text.strip())
    amount = float(found.group(1)) if found is not None else 0.0
    if not 0 < amount <= LARGEST_CARD_GIB:
        raise UserError(
            "card-unclear", "This is no memory of a card.", where=f"--card {text!a:.40}", fix="For example --card 24GB."
        )
    return int(amount * GIB)


def _counted(recipe: Recipe, situation: Situation, for_card: bool) -> dict[str, Any]:
    env = {**environment_plan(situation).applied_to(os.environ), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="lora-rocm-") as folder:
        job = Path(folder) / "job.json"
        write_json(job, {"recipe": recipe.model_dump(mode="json"), "for_card": for_card})
        return run_for_json(MODULE, [str(job)], env)


def _settings(situation: Situation) -> Settings:
    return environment_plan(situation).settings


def _room_of_card(total_bytes: int) -> Room:
    desktop = min(max(int(total_bytes * DISPLAY_SHARE), DISPLAY_MIN_BYTES), DISPLAY_MAX_BYTES)
    why = f"a card of {size_text(total_bytes)}, less what a desktop and the GPU's libraries take"
    return Room(max(0, total_bytes - desktop - CONTEXT_BYTES), why)


def _room_here(situation: Situation, gpu: dict[str, Any] | None) -> Room:
    """As the worker would see it; where torch sees no GPU, what the system says of one."""
    if gpu is not None:
        return Room(gpu["budget_bytes"], f"{gpu['name']}, as training sees it", gpu["integrated"])
    known = budget(situation.facts, situation.gpu) if situation.gpu is not None else None
    if known is None or situation.gpu is None:
        return Room(None, "no GPU is seen here; --card 24GB says whether it fits one")
    return Room(max(0, known.total_bytes - CONTEXT_BYTES), known.why, bool(situation.gpu.integrated))


def _facts(footprint: Footprint) -> dict[str, Any]:
    """What is worth printing of a footprint."""
    whole = footprint.to_json()
    keys = ("weight_bytes", *ADAPTER, "work")
    return {"shape": footprint.shape} | {key: whole[key] for key in keys} | {"blocks": len(footprint.blocks)}


def _lines(
    name: str,
    recipe: Recipe,
    precision: str,
    footprint: Footprint,
    room: Room,
    rows: Sequence[Plan],
    chosen: Plan | None,
    rates: Rates,
) -> Iterator[str]:
    train = recipe.train
    yield (
        f"{name}: {footprint.shape}, batch {train.batch_size} x "
        f"{train.gradient_accumulation_steps}, rank {recipe.lora.rank}, {precision}"
    )
    adapter = size_text(sum(getattr(footprint, name) for name in ADAPTER))
    yield f"weights {size_text(footprint.weight_bytes)}, adapter and optimizer {adapter}"
    if footprint.narrow_layers:
        yield (
            f"{footprint.narrow_layers} adapted layers have fewer inputs or outputs than lora.rank: a lower rank can "
            "say as much there"
        )
    yield room.why if room.num_bytes is None else f"memory for training: {size_text(room.num_bytes)} ({room.why})"
    yield ""
    blocks = f"{'recomputed':>11}{'offloaded':>11}"
    yield f"{'memory':<10}{blocks}{'at once':>9}{'graphs':>8}{'peak':>11}{'a step':>10}  fits"
    fastest = min(row.step_s for row in rows)
    for row in rows:
        seconds = f"{row.step_s:.3f} s" if rates.known else f"{row.step_s / fastest:.2f} x"
        fits = "" if room.num_bytes is None else "yes" if row.needed_bytes <= room.num_bytes else "no"
        mark = "  <- chosen" if row == chosen else ""
        graphs, peak = "yes" if row.graphs else "no", size_text(row.peak_bytes)
        blocks = f"{len(row.recomputed):>11}{len(row.offloaded):>11}"
        yield f"{row.mode:<10}{blocks}{row.rows:>9}{graphs:>8}{peak:>11}{seconds:>10}  {fits}{mark}".rstrip()
    yield ""
    if chosen is not None:
        yield f"runtime.memory: {recipe.runtime.memory} would choose: {plan_text(chosen)}"
        if rates.known and train.max_train_steps:
            yield f"{train.max_train_steps} steps: about {time_text(chosen.step_s * train.max_train_steps)}"
    if not rates.known:
        yield "times are relative to the fastest: no GPU was measured"


def plan_text(chosen: Plan) -> str:
    """A plan in words: "selective (12 blocks recomputed), 2 samples at once"."""
    count = len(chosen.recomputed)
    more = f", {len(chosen.offloaded)} of them offloaded" if chosen.offloaded else ""
    blocks = f" ({count} blocks recomputed{more})" if count else ""
    samples = "1 sample" if chosen.rows == 1 else f"{chosen.rows} samples"
    return f"{chosen.mode}{blocks}, {samples} at once{', captured' if chosen.graphs else ''}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
