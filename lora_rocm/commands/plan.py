"""``lora-rocm plan``: predicts memory and time of each memory plan of a recipe, without loading anything."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lora_rocm.dataset.same_sizes import alike_squares
from lora_rocm.errors import UserError
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.families.spec import Fp16
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text, size_text, time_text
from lora_rocm.hardware.archs import arch_of
from lora_rocm.hardware.facts import Gpu
from lora_rocm.hardware.memory_budget import (
    DESKTOP,
    GIB,
    HELD,
    OF_CARD,
    MemoryBudget,
    Part,
    card_budget,
    desktop_bytes,
    parts_text,
)
from lora_rocm.hardware.settings import Settings
from lora_rocm.planning.fit import ADAPTER, does_not_fit, job_of, plan_text
from lora_rocm.planning.format_errors import loss_text, weights_text, whole_text
from lora_rocm.planning.step_cost import CONTEXT_BYTES, MODES, Footprint, Plan, Rates, choose, table
from lora_rocm.processes.job_file import to_json
from lora_rocm.processes.jobs import Counted, CountedGpu, PackedEncoder, PlanJob
from lora_rocm.processes.tool import ask
from lora_rocm.recipe.load import load_recipe
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.environment import plan as environment_plan
from lora_rocm.rules.memory_rules import budget_of, memory_table
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rules.tuned_rules import attention_text

PUBLISHED = "counted by the configuration that the family's first model has published, as all of its fine-tunes have it"
CARD = re.compile(r"(\d+(?:\.\d+)?)\s*(?:G|GB|GiB)?", re.IGNORECASE)
LARGEST_CARD_GIB = 4096
PRECISION_ERROR = {"fp16": 0.002, "bf16": 0.018}
"""Relative difference of a LoRA's gradients from those in float32 (``benchmarks/precision_error.py``)."""
FITS_FP16: dict[Fp16, str] = {
    "whole": "its activations fit fp16",
    "products": "products in fp16, the residual stream between them in float32, for its sums leave the range of fp16",
    "never": "factors of its products are too large for fp16",
}


@dataclass(frozen=True)
class Room:
    """Memory available for tensors.

    Attributes:
        num_bytes: None if there is no limit to compare with.
        shared: this is main memory; offloading weights then saves nothing.
        parts: the amounts that were counted, in bytes; negative if subtracted.
    """

    num_bytes: int | None
    why: str
    shared: bool = False
    parts: tuple[Part, ...] = ()


def plan(
    recipe_path: str, overrides: Sequence[str], *, card: str | None, as_json: bool, registry: Registry = PRODUCT
) -> int:
    """Print the memory and time of each memory plan, and the plan that training would choose.

    Args:
        recipe_path: the recipe; its model is not downloaded, and its images are not read.
        overrides: ``section.key=value``.
        card: memory of a card, as "24GB"; None: this machine's GPU.
        as_json: print one JSON object.
        registry: the available model families.

    Raises:
        LoraRocmError: recipe or model are wrong; ``does-not-fit``, after the table.
    """
    loaded = load_recipe(recipe_path, overrides, registry)
    recipe = loaded.recipe
    total = None if card is None else card_bytes(card)
    situation = situation_here(recipe)
    counted = _counted(recipe, situation, card is not None)
    footprint, gpu = Footprint.from_json(counted.footprint), counted.gpu
    room = _room_of_card(total) if total is not None else _room_here(situation, gpu)
    rates = gpu.rates if gpu is not None and total is None else Rates()
    on_gpu = total is not None or gpu is not None
    job = job_of(recipe, _settings(situation), on_gpu=on_gpu, can_offload=not room.shared)
    chosen = choose(room.num_bytes, footprint, job, rates)
    rows = table(room.num_bytes, footprint, replace(job, modes=MODES if not room.shared else MODES[:-1]), rates)
    if as_json:
        found = {"footprint": _facts(footprint), "room": asdict(room)}
        found |= {name: to_json(counted)[name] for name in ("precision", "model_is_here", "encoders")}
        plans = {"plans": [asdict(row) for row in rows], "chosen": asdict(chosen) if chosen is not None else None}
        more = {"seconds_are_known": rates.known, "attention": attention_text(situation)}
        _say(json.dumps({**found, **plans, **more}, indent=1))
    else:
        for line in _lines(loaded.name, recipe, counted.precision, footprint, room, rows, chosen, rates):
            _say(legible(line))
        gpu_here = situation.gpu if total is None else None
        for line in (*_precision_lines(recipe, counted.precision, gpu_here), *_unread_lines(recipe)):
            _say(legible(line))
        for encoder in counted.encoders:
            _say(legible(_encoder_text(encoder)))
        _say(legible(f"attention: {attention_text(situation)}"))
        if not counted.model_is_here:
            _say(legible(f"{recipe.model.name_or_path} is not on this machine: {PUBLISHED}"))
    if chosen is None and room.num_bytes is not None:
        raise does_not_fit(recipe, footprint, job, rates, room.num_bytes)
    return 0


def card_bytes(text: str) -> int:
    """Return the bytes of "24GB"; a card's GB are GiB.

    Raises:
        UserError: the text is no amount of memory.
    """
    found = CARD.fullmatch(text.strip())
    amount = float(found.group(1)) if found is not None else 0.0
    if not 0 < amount <= LARGEST_CARD_GIB:
        raise UserError(
            "card-unclear", "This is no memory of a card.", where=f"--card {text!a:.40}", fix="For example --card 24GB."
        )
    return int(amount * GIB)


def _counted(recipe: Recipe, situation: Situation, for_card: bool) -> Counted:
    env = {**environment_plan(situation).applied_to(os.environ), "HF_HUB_OFFLINE": "1"}
    job = PlanJob(recipe.model_dump(mode="json"), for_card=for_card, for_gpu=for_card or situation.gpu is not None)
    return ask(job, Counted, env)


def _settings(situation: Situation) -> Settings:
    return environment_plan(situation).settings


def _room_of_card(total_bytes: int) -> Room:
    """The memory that a card of this size would have for tensors, with a desktop on it."""
    card, desktop = Part(OF_CARD, total_bytes), Part(DESKTOP, -desktop_bytes(total_bytes))
    found = card_budget(card, desktop, memory_table().reserves, is_linux=True, shows=True)
    return Room(found.total_bytes, parts_text(found.parts), parts=found.parts)


def _room_here(situation: Situation, gpu: CountedGpu | None) -> Room:
    """Return the memory that the worker would have; if torch sees no GPU, estimate it from the system's information."""
    known = budget_of(situation.facts, situation.gpu)
    if gpu is not None:
        parts = _parts_of(known, gpu.budget_bytes)
        counted = f": {parts_text(parts)}" if parts else ""
        return Room(gpu.budget_bytes, f"{gpu.name}, as training sees it{counted}", gpu.integrated, parts)
    if known is None or situation.gpu is None:
        return Room(None, "no GPU is seen here; --card 24GB says whether it fits one")
    if not known.capped:  # then nothing of it is counted yet
        return Room(max(0, known.total_bytes - CONTEXT_BYTES), known.why)
    return Room(known.total_bytes, parts_text(known.parts), bool(situation.gpu.integrated), known.parts)


def _parts_of(known: MemoryBudget | None, budget_bytes: int) -> tuple[Part, ...]:
    """What was counted of a card on the way to a budget that the worker's code measured; () if that is not known.

    What is neither for libraries nor kept free is held by others.
    """
    if known is None or not known.library_bytes:
        return known.parts if known is not None and known.capped else ()
    rest = [part for part in known.parts if part.name not in (HELD, DESKTOP)]
    held = budget_bytes - sum(part.num_bytes for part in rest)
    name = DESKTOP if any(part.name == DESKTOP for part in known.parts) else HELD
    return (rest[0], *([Part(name, held)] if held < 0 else ()), *rest[1:])


def _facts(footprint: Footprint) -> dict[str, Any]:
    """Return the printed fields of a footprint."""
    whole = footprint.to_json()
    keys = ("weight_bytes", *ADAPTER, "optimizer_bytes", "work")
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
        f"{train.gradient_accumulation_steps}, rank {recipe.lora.rank}, {'float32' if precision == 'no' else precision}"
    )
    adapter = size_text(sum(getattr(footprint, name) for name in ADAPTER))
    state = f"{recipe.optim.optimizer} keeps {size_text(footprint.optimizer_bytes)}"
    yield f"weights {size_text(footprint.weight_bytes)}, adapter and optimizer {adapter} ({state})"
    for source in {source.index: source for source in recipe.data.resolved_sources()}.values():
        if source.class_prompt is not None:
            yield f"before training: {source.num_class_images} {source.name}, where the cache has none"
    yield from alike_squares(recipe.data) if recipe.spec.reads("data.resolution") else ()
    if recipe.model.quantization != "none":
        form, spec = recipe.model.quantization, recipe.spec
        yield f"model.quantization: {weights_text(form)}; {loss_text(form)}"
        yield whole_text(form, spec.name, spec.title)
    if footprint.narrow_layers:
        yield (
            "lora.rank is larger than the inputs or outputs of "
            f"{count_text(footprint.narrow_layers, 'adapted layer')}: a lower rank can say as much there"
        )
    if text := recipe.lora.unstarted_text(footprint.unstarted_layers):
        yield text
    yield room.why if room.num_bytes is None else f"memory for training: {size_text(room.num_bytes)} ({room.why})"
    yield ""
    # table of all plans
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
    # the chosen plan
    if chosen is not None:
        why = ", as train.gradient_checkpointing: true asks" if train.gradient_checkpointing else ""
        yield f"runtime.memory: {recipe.runtime.memory} would choose: {plan_text(chosen)}{why}"
        if rates.known and train.max_train_steps:
            steps = train.max_train_steps
            yield f"{count_text(steps, 'step')}: about {time_text(chosen.step_s * steps)}"
    if not rates.known:
        yield "times are relative to the fastest: no GPU was measured"


def _precision_lines(recipe: Recipe, precision: str, gpu: Gpu | None) -> Iterator[str]:
    if precision not in PRECISION_ERROR:
        if recipe.train.mixed_precision == "auto":
            yield "train.mixed_precision: auto is no (float32) on the CPU, where this machine would train"
        return
    arch = arch_of(gpu.gfx) if gpu is not None else None
    emulates = arch is not None and not arch.bf16
    why = [f"{arch.gfx} computes bf16 slowly"] if arch is not None and emulates else []
    if emulates or precision == "fp16":
        why.append(f"{recipe.spec.title}: {FITS_FP16[recipe.spec.fp16]}")
    reasons = f" ({'; '.join(why)})" if why else ""
    yield f"train.mixed_precision: {recipe.train.mixed_precision} is {precision}{reasons}"
    yield f"{precision} changes the gradients by up to about {100 * PRECISION_ERROR[precision]:.1f} % of their size"


def _unread_lines(recipe: Recipe) -> Iterator[str]:
    if recipe.spec.trains_on_texts:
        of_full = "rows are full" if recipe.data.packing else "rows may be shorter"
        yield f"the texts were not read: data.max_length is counted, and {of_full}; lora-rocm check counts tokens"


def _encoder_text(encoder: PackedEncoder) -> str:
    taken, dense = size_text(encoder.weight_bytes), size_text(encoder.dense_bytes)
    rounds = weights_text(encoder.format)
    return f"{encoder.component} takes {taken} while captions are encoded ({dense} dense); {rounds}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
