"""Child process of ``lora-rocm bench loader``: ``python -m lora_rocm.children.bench.loader_child JOB.json``.

It measures how fast a recipe's batches are loaded from the cache and decoded from image files, with different
numbers of workers. It emits the same events as ``lora_rocm.children.bench.device_child``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_rocm.checks.timing import Call, MeasuredRow, measure
from lora_rocm.children.measuring import machine, run_reported
from lora_rocm.dataset.entry_spec import IMAGE
from lora_rocm.dataset.images.views import views_of
from lora_rocm.dataset.order.batch_plan import Item
from lora_rocm.dataset.sources.sample_image import load_image
from lora_rocm.dataset.sources.scan import Sample
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.encoded_cache.image_preprocess import EncodeRequest
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.hardware.settings import settings_from
from lora_rocm.loader.batches import BatchPlan, Prepared, open_workers, prepare
from lora_rocm.loader.cached_dataset import Order, Orders, Read
from lora_rocm.loader.worker_pool import LoaderWorkers
from lora_rocm.processes.cores import core_count
from lora_rocm.processes.jobs import LoaderJob, job_of
from lora_rocm.recipe.kinds import recipe_from
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import Event, MachineEvent, NoticeEvent
from lora_rocm.rundir.events import emit
from lora_rocm.rundir.run_context import RunContext

BATCHES, BATCHES_S = 400, 4.0
"""Limits of a row: it ends after this number of batches or seconds, whichever comes first."""
WARM_UP = 16  # excludes batches that the workers prefetched during start-up


Timed = Callable[[], float]


@dataclass(frozen=True)
class Decoder:
    """Loads batches from the image files: it decodes, scales and crops them, as when the cache is filled.

    entry: name of a cache entry that depends only on the image.
    images: item and sample, keyed by cache key.
    """

    entry: str
    images: Mapping[str, tuple[Item, Sample]]

    def __getitem__(self, order: Order, /) -> Read:
        pixels = []
        for key in order.keys[self.entry]:
            item, sample = self.images[key]
            assert item.geometry is not None, "its image is read"
            number = [view_key for (view_key,) in item.keys[self.entry]].index(key)
            wanted = EncodeRequest(sample, item.geometry)
            pixels.append(wanted.tensor(load_image(sample), views_of(sample.options)[number]))
        return Read(order, {"pixels": torch.stack(pixels)}, {})


def decoder_of(prepared: Prepared, family: ModelFamily) -> Decoder:
    """Return a decoder for the images of a recipe."""
    entry = next(encoder.entry.name for encoder in family.encoders() if encoder.entry.inputs == (IMAGE,))
    pairs = zip(prepared.items, prepared.samples, strict=True)
    return Decoder(entry, {key: (item, sample) for item, sample in pairs for (key,) in item.keys[entry]})


def worker_counts() -> list[int]:
    """Return the numbers of workers to measure: up to 4, and the number of CPU cores."""
    return sorted({0, 1, 2, 4, max(4, core_count())})


def reading(found: dict[str, Any], workers: LoaderWorkers, reported: list[str], plan: BatchPlan) -> Timed:
    """Return a function that loads batches and returns the seconds per batch.

    It stores the seconds until the first batch in ``found``. It raises RuntimeError if the workers reported a notice.
    """

    def call() -> float:
        started = time.perf_counter()
        batches = workers.reads(Orders(plan, 0, None))
        next(batches)
        found["first_s"] = time.perf_counter() - started
        for _ in range(WARM_UP if workers.count else 0):
            next(batches)
        count, started = 0, time.perf_counter()
        while count < BATCHES and time.perf_counter() - started < BATCHES_S:
            next(batches)
            count += 1
        seconds = (time.perf_counter() - started) / count
        workers.close()
        if reported:
            raise RuntimeError(reported[0])
        return seconds

    return call


def _note(reported: list[str], event: Event) -> None:
    if isinstance(event, NoticeEvent):
        reported.append(event.text)


def works_of(
    recipe: Recipe, prepared: Prepared, cache: LatentCache, plan: BatchPlan, family: ModelFamily
) -> list[MeasuredRow]:
    """Return all rows to measure: each number of workers with both sources, the cache and the image files."""
    works = []
    for source in ("cache", "images"):
        for count in worker_counts():
            said: list[str] = []
            found: dict[str, Any] = {}
            runtime = recipe.runtime.model_copy(update={"workers": count, "workers_on_windows": True})
            workers = open_workers(cache, prepared.entries, runtime, RunContext(partial(_note, said)))
            if source == "images":
                workers.source = decoder_of(prepared, family)
            fields = {"source": source, "workers": count, "batch_size": plan.batch_size}
            works.append(MeasuredRow(fields, plan.batch_size, partial(reading, found, workers, said, plan), found))
    return works


def _called(call: Call) -> float:
    seconds = call()
    assert isinstance(seconds, float)
    return seconds


def main() -> int:
    """Fill the cache as training does, measure all rows, and return the exit code.

    An unexpected error leaves a traceback.
    """
    return run_reported(_measure)


def _measure() -> None:
    job = job_of(LoaderJob)
    recipe = recipe_from(job.recipe)
    device, settings = choose_device(recipe.runtime.device), settings_from(os.environ)
    apply(settings, device)
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    family, cache = family_for(recipe), LatentCache(Path(recipe.cache.dir))
    prepared = prepare(recipe, family, Encoding(cache, device))
    plan = BatchPlan(prepared.items, recipe.train.batch_size, recipe.train.gradient_accumulation_steps, 0)
    emit(MachineEvent(**{**machine(device, settings), "images": len(prepared.items)}))
    measure(works_of(recipe, prepared, cache, plan, family), job.start, _called)


if __name__ == "__main__":
    sys.exit(main())
