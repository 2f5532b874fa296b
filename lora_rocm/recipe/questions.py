"""Notices about the values of a recipe that are valid but unusual."""

from __future__ import annotations

from dataclasses import replace

from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.judge import broken_rules, values_of
from lora_rocm.recipe.key_rules.run_rules import ALONE
from lora_rocm.recipe.layers import Layered
from lora_rocm.recipe.schema import DataSection, Recipe
from lora_rocm.recipe.trigger import trigger_notices

USUAL_STEP = 256  # of resolutions: 512, 768, 1024
VALIDATION = ("validation_every_n_steps", "validation_every_n_epochs")


def questions(recipe: Recipe, layers: Layered) -> list[str]:
    """Return notices about values that are valid but unusual."""
    # learning rate and warm-up
    found = []
    steps = recipe.train.max_train_steps
    if steps and recipe.optim.warmup_steps(steps) >= steps:
        given = "lr_warmup_steps" if recipe.optim.lr_warmup_steps else "lr_warmup_ratio"
        found.append(
            f"{layers.where(('optim', given))}: the warm-up is as long as the run "
            f"({count_text(steps, 'step')}), so the learning rate never reaches its peak. A tenth of the run is usual."
        )
    for name in (name for name in type(recipe.optim).model_fields if name.endswith("learning_rate")):
        rate, (lowest, highest) = getattr(recipe.optim, name), recipe.optim.usual_rates
        if rate is not None and not lowest <= rate <= highest:
            height = "high" if rate > highest else "low"
            found.append(
                f"{layers.where(('optim', name))}: {rate:g} is very {height} for {recipe.optim.optimizer}, "
                f"{recipe.optim.rate_advice}"
            )
    # validation and resolution
    if recipe.data.validation_split and not any(getattr(recipe.train, key) for key in VALIDATION):
        every = " or ".join(f"train.{key}" for key in VALIDATION)
        found.append(
            f"{layers.where(('data', 'validation_split'))}: these samples are not trained on, and only "
            f"`lora-rocm compare` measures their loss. To measure it during the run, set {every}."
        )
    if (sides := _sides_of_a_size(recipe.data)) is not None:
        found.append(
            f"{layers.where(('data', 'resolution'))}: each image is seen at {sides[0]} and at {sides[1]}. If you mean "
            f"a width and a height, write only {round((sides[0] * sides[1]) ** 0.5)}: buckets have many shapes anyway."
        )
    if steps and recipe.train.validation_every_n_steps > steps:
        found.append(
            f"{layers.where(('train', 'validation_every_n_steps'))}: the run has only {count_text(steps, 'step')}, so "
            "it measures no held-out loss."
        )
    # keys without effect because a feature is switched off
    switched_off = [replace(rule, unless_written=()) for rule in ALONE]
    unread = broken_rules(switched_off, values_of(recipe, recipe.spec, layers.data))
    found += [f"{layers.where(each.key)}: {each.what}." for each in unread]
    return [*found, *trigger_notices(recipe, layers.where)]


def _sides_of_a_size(data: DataSection) -> tuple[int, ...] | None:
    """Return the two values of ``data.resolution`` if the user may have meant a width and a height, else None.

    Two multiples of 256 with the smaller one first are taken as resolutions. If the values are not used, the result is
    also None.
    """
    sides = data.resolution
    if not isinstance(sides, tuple) or len(sides) != 2:
        return None
    meant = sides[0] < sides[1] and not any(side % USUAL_STEP for side in sides)
    read = not data.sources or any(source.resolution is None for source in data.sources)
    return sides if read and not meant else None
