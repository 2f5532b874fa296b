"""The samples of ``data.watched``: prepared like the held-out samples of a separate recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.foundation.units import count_text
from lora_rocm.loader.batches import Prepared, open_workers, prepare
from lora_rocm.loader.worker_pool import LoaderWorkers
from lora_rocm.recipe.schema import Recipe


@dataclass(frozen=True)
class Watched:
    """Samples that are only used to measure the loss, never to train.

    family: the run's family, with the objective of these samples.
    """

    family: ModelFamily
    prepared: Prepared
    workers: LoaderWorkers


def prepare_watched(recipe: Recipe, encoding: Encoding) -> Watched | None:
    """Find and encode the samples of ``data.watched``; None if there are none. For errors see ``prepare``."""
    watching, context = recipe.watching, encoding.context
    if watching is None:
        return None
    family = family_for(watching)
    prepared = prepare(watching, family, replace(encoding, more=()))
    samples = count_text(len(prepared.held_out), "sample")
    context.notice(f"The loss of data.watched is measured: {samples}, not used for training.")
    for notice in prepared.notices:
        context.notice(f"data.watched: {notice}")
    for problem in prepared.set_aside:
        context.notice(f"data.watched, skipped: {problem.where}: {problem.what} {problem.fix}".rstrip())
    runtime = recipe.runtime.model_copy(update={"workers": 0})
    return Watched(family, prepared, open_workers(encoding.cache, prepared.entries, runtime, context))
