"""The first samples of a language model's recipe as the model reads them, found by ``lora-rocm check``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_rocm.commands.check import checked
from lora_rocm.commands.output import Failure
from lora_rocm.errors import Problem
from lora_rocm.page_parts.texts import t
from lora_rocm.recipe.load import load_recipe  # recipe: only read, for the page
from lora_rocm.ui.background import Work

BEGIN, END = "\u27e6", "\u27e7"
"""The marks of ``check`` around the parts that are trained on."""
NUM_BARS = 12


@dataclass(frozen=True)
class SamplePart:
    """A part of a sample. is_trained: whether the loss counts it."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class LengthBar:
    """The samples with a length in a range. share: 1 for the fullest range."""

    first: int
    last: int
    count: int
    share: float


@dataclass(frozen=True)
class TextSamples:
    """The texts of a recipe.

    Attributes:
        usable: number of usable texts.
        skipped: number of texts that training skips.
        looked_at: number of texts, the first ones, that the tokenizer inspected; 0 if all.
        held_out: number of samples that are held out for the validation loss, about.
        samples: the first texts as the model reads them.
        lengths: samples per epoch by their number of tokens.
        num_tokens: tokens per epoch, about.
        warnings: the warnings of ``check`` about the texts.
        problems: the first texts that are skipped, with the reasons.
        notices: the notices of ``check``.
        failure: why training is not possible, or None.
    """

    usable: int
    skipped: int
    looked_at: int
    held_out: int
    samples: Sequence[Sequence[SamplePart]]
    lengths: Sequence[LengthBar]
    num_tokens: int
    warnings: Sequence[str]
    problems: Sequence[Problem]
    notices: Sequence[str]
    failure: Failure | None


def text_samples(recipe: Path, work: Work) -> TextSamples:
    """Inspect the texts of a recipe. A child process counts their tokens.

    Raises:
        LoraRocmError: the recipe is wrong, or the child process failed.
    """
    loaded = load_recipe(str(recipe))
    work.report(t("texts.loading"))
    found = checked(loaded, "", work.advance)
    work.require_wanted()
    data, plan = found.data, found.plan
    lengths = {} if plan is None else {sum(shape.sizes): count for shape, count in plan.data.buckets.items()}
    return TextSamples(
        0 if data is None else data.usable,
        0 if data is None else data.num_problems,
        0 if data is None else data.looked_at,
        0 if plan is None else plan.data.held_out or 0,
        [] if data is None else [parts_of(text) for text in data.shown],
        bars(lengths),
        sum(length * count for length, count in lengths.items()),
        () if data is None else data.first_warnings,
        () if data is None else data.problems,
        (*found.notes, *(() if data is None else (*data.first_notices, *data.notices))),
        found.error,
    )


def parts_of(text: str) -> list[SamplePart]:
    """Return a sample in parts, without the marks. Each mark begins or ends a part that is trained on."""
    found, is_trained = list[SamplePart](), False
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece in (BEGIN, END):
            is_trained = piece == BEGIN
        elif piece:
            found.append(SamplePart(piece, is_trained))
    return found


def bars(lengths: dict[int, int]) -> list[LengthBar]:
    """Return at most NUM_BARS ranges of equal width, from the shortest to the longest length."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = max(1, -(-(high - low + 1) // NUM_BARS))
    counts = [0] * (1 + (high - low) // width)
    for length, count in lengths.items():
        counts[(length - low) // width] += count
    most = max(counts) or 1
    return [
        LengthBar(low + number * width, min(high, low + (number + 1) * width - 1), count, count / most)
        for number, count in enumerate(counts)
    ]
