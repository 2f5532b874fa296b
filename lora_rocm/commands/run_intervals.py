"""Fits the warm-up and the intervals of a recipe to the length of its run. ``lora-rocm new`` and the page ask here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lora_rocm.foundation.units import count_text
from lora_rocm.recipe.schema import Recipe

TIMES_PER_RUN = 4
"""Least number of previews and saved files of a run that is shorter than the recipe expects."""
WARMUP_SHARE = 10


@dataclass(frozen=True)
class FittedKey:
    """A key that gets another value.

    Attributes:
        section, key: place in the recipe.
        value: its new value.
        why: the reason.
        instead_of: the key of the section that it replaces; may be empty.
    """

    section: str
    key: str
    value: int
    why: str
    instead_of: str = ""


def fitted_keys(
    recipe: Recipe, has: Callable[[str, str], bool], steps: int, steps_per_epoch: int, how_sure: str = ""
) -> list[FittedKey]:
    """Return the shorter warm-up and intervals of previews and files for a run with fewer steps than expected.

    So even a short run leaves several files to choose from, with a preview for each.

    Args:
        recipe: the recipe.
        has: whether the recipe's text gives a key of a section.
        steps: number of steps of the run.
        steps_per_epoch: number of steps of an epoch.
        how_sure: word before the number of steps, such as "about ".
    """
    found = list[FittedKey]()
    every, run = max(1, steps // TIMES_PER_RUN), f"the run of {how_sure}{count_text(steps, 'step')}"
    warmup = recipe.optim.lr_warmup_steps
    if warmup and warmup * WARMUP_SHARE > steps and warmup > (shorter := max(1, steps // WARMUP_SHARE)):
        found.append(FittedKey("optim", "lr_warmup_steps", shorter, f"a tenth of {run}"))
    # Files to choose from: a recipe without the key saves too
    between = recipe.output.save_steps(steps_per_epoch)
    if is_short := between * TIMES_PER_RUN > steps and between > every:
        by_epochs = "save_every_n_epochs" if has("output", "save_every_n_epochs") else ""
        why = f"{_times(steps, every)} in {run}, so that there are files to choose from"
        found.append(FittedKey("output", "save_every_n_steps", every, why, by_epochs))
    # Previews and validation
    if is_short and 0 < recipe.sample.every_n_epochs * steps_per_epoch < steps < (
        recipe.sample.every_n_epochs * steps_per_epoch * TIMES_PER_RUN
    ):
        why = f"{_times(steps, every)} in {run}, with the files"
        found.append(FittedKey("sample", "every_n_steps", every, why, "every_n_epochs"))
    for section, key, now in (
        ("sample", "every_n_steps", recipe.sample.every_n_steps),
        ("train", "validation_every_n_steps", recipe.train.validation_every_n_steps),
    ):
        if now and now * TIMES_PER_RUN > steps and now > every and has(section, key):
            found.append(FittedKey(section, key, every, f"{_times(steps, every)} in {run}"))
    return found


def _times(steps: int, every: int) -> str:
    return count_text(steps // every, "time")
