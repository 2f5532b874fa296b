"""Child process of ``lora-rocm check``: inspects the texts of a recipe for a model that is trained on text.

``python -m lora_rocm.children.check_texts JOB.json`` prints its progress as events, then one JSON object (``Seen``)
or an error event. No weights are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from lora_rocm.children.json_child import answer
from lora_rocm.dataset.progress import Progress
from lora_rocm.dataset.rows.records import UnusableText
from lora_rocm.dataset.rows.row_edge import row_edge
from lora_rocm.dataset.sample_table import Samples
from lora_rocm.dataset.sources.text_scan import NUM_KEPT, Notes, SkippedTexts, add_parts, texts_of
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.prepare import lengths_of_texts, texts_in_cache
from lora_rocm.errors import Problem
from lora_rocm.families.base import ModelFamily, TextReader, family_for
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.planning.data_plan import Seen
from lora_rocm.processes.jobs import CheckTextsJob
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import CacheEvent
from lora_rocm.rundir.events import emit

SHOWN, LOOKED_AT = 3, 10_000


def seen(
    recipe: Recipe,
    reader: TextReader,
    most: int = LOOKED_AT,
    family: ModelFamily | None = None,
    step: Callable[[], None] = lambda: None,
) -> Seen:
    """Inspect the first ``most`` texts of a recipe, and return counts, problems and samples.

    ``family``: if set, the texts in its cache are counted, too. ``step`` is called after each text.

    Raises:
        DataError: a source cannot be read, or no text can be used.
    """
    pairs = recipe.objective.compares_pairs
    found, samples, aside = Seen(), Samples(recipe.data.resolved_sources()), SkippedTexts()
    for text in texts_of(recipe.data, Notes(), pairs=pairs):
        if isinstance(text, Problem):
            aside.add(text)
            continue
        if found.looked_at == most:
            break
        found.looked_at += 1
        if not add_parts(samples, text, reader.parts, aside, pairs):
            found.refused[text.sample.source] = found.refused.get(text.sample.source, 0) + 1
            if len(found.problems) < NUM_KEPT and aside.last is not None:
                found.problems.append(aside.last)
        step()
    else:  # these are all the texts
        if not samples:
            raise aside.all_of_them
    found.warnings, found.notices = list(reader.warnings), list(reader.notices)
    found.shown = [_shown(reader, sample.caption) for sample in islice(samples, SHOWN)]
    if samples:
        lengths, found.held_out = lengths_of_texts(recipe, reader, samples)
        found.lengths = dict(sorted(lengths.items()))
        if family is not None:
            found.cached = texts_in_cache(recipe, family, LatentCache(Path(recipe.cache.dir)), samples)
    return found


def _report(what: str, done: int, total: int, per_second: float) -> None:
    emit(CacheEvent(what=what, done=done, total=total, per_second=per_second))


def _shown(reader: TextReader, text: str) -> str:
    """Return a sample as the model reads it, or the reason why it cannot be shown."""
    try:
        with row_edge("This sample cannot be shown", ""):
            return reader.shown(text)
    except UnusableText as error:
        return error.what


def main(registry: FamilyRegistry = FAMILIES) -> int:
    """Inspect the texts of the job's recipe, print the result, and return the exit code."""

    def found(job: CheckTextsJob) -> Seen:
        recipe = recipe_from(job.recipe, registry)
        family = family_for(recipe)
        reader = family.texts
        progress = Progress("texts", min(job.num_texts, LOOKED_AT), _report)
        return seen(recipe, reader, family=family, step=progress.step) if reader else Seen()

    return answer(CheckTextsJob, found)


if __name__ == "__main__":
    sys.exit(main())
