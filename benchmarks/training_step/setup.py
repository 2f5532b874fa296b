"""The measured run: a run of a recipe as the worker has it before its first step.

Only the data (``synthetic``) and the base's weights (``base_models/random_weights.py``) may be made up.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lora_rocm.base_models.random_weights import PREFIX
from lora_rocm.dataset.images.buckets import Geometry, bucket_sizes, image_shape
from lora_rocm.device.precision import choose_device, compute_dtype
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.errors import StorageError
from lora_rocm.families.base import ModelFamily, Tensors, family_for
from lora_rocm.hardware.settings import Settings
from lora_rocm.loader.batches import Item, Prepared, SampleStatistics
from lora_rocm.recipe.sample_section import SampleSection
from lora_rocm.recipe.schema import Recipe
from lora_rocm.recipe.sections import path_rule
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.train import compilation, pipeline
from lora_rocm.train.artifacts import Artifacts
from lora_rocm.train.build_trainer import first_pass, new_trainer
from lora_rocm.train.context import Data, StartContext
from lora_rocm.train.hooks import TensorBoard
from lora_rocm.train.loop import Trainer
from lora_rocm.train.session import Session

NEVER = 10**9
MIN_ITEMS = 16
ROUNDS_OF_ITEMS = 4  # effective batches until the same made-up image comes again


def recipe_for(recipe: Recipe, random_weights: bool, folder: Path) -> Recipe:
    """Return the recipe without work between steps (previews, validation loss, checkpoints) and without an end.

    Args:
        recipe: the user's recipe.
        random_weights: use a base with random weights, and a separate cache.
        folder: folder for that cache.
    """
    parts: dict[str, Any] = {
        "train": recipe.train.model_copy(
            update={"max_train_steps": NEVER, "epochs": None, "validation_every_n_steps": 0}
        ),
        "sample": SampleSection(),
        "output": recipe.output.model_copy(update={"save_every_n_steps": NEVER}),
    }
    if random_weights:
        others = {name: None for name, field in type(recipe.model).model_fields.items() if path_rule(field)}
        base = {**others, "name_or_path": PREFIX + recipe.model.name_or_path}
        parts["model"] = recipe.model.model_copy(update=base)
        parts["lora"] = recipe.lora.model_copy(update={"init_from": None})
        parts["cache"] = recipe.cache.model_copy(update={"dir": str(folder / "cache")})
    return recipe.model_copy(update=parts)


@dataclass
class Bench(AbstractContextManager["Bench"]):
    """A run before its first step. Leaving the context closes its files; dropping the object frees its memory.

    Attributes:
        steps: the ``step`` events so far.
        incidents: failures, and the changes or losses because of them, in words.
    """

    start: StartContext
    data: Data
    artifacts: Artifacts
    trainer: Trainer
    steps: list[dict[str, Any]]
    incidents: list[str]
    closing: ExitStack = field(default_factory=ExitStack)

    def make_steps(self, count: int) -> list[dict[str, Any]]:
        """Make ``count`` further updates; return their events."""
        begin = len(self.steps)
        self.trainer.fit(self.trainer.position.updates + count)
        return self.steps[begin:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.close()
        # the session's thread that watches the parent lives on, and would keep them alive
        self.start.session.readers.clear()


def open_bench(
    recipe: Recipe, settings: Settings, folder: Path, random_weights: bool, watch_parent: bool, text_chunks: int = 1
) -> Bench:
    """Do everything that the worker does before its first step.

    Args:
        recipe: from ``recipe_for``.
        settings: the parent's plan for this machine.
        folder: folder for a run directory, and with random weights a cache.
        random_weights: also make up the data.
        watch_parent: exit when standard input ends.
        text_chunks: made-up text states are longer than a usual caption's by this factor.

    Raises:
        LoraRocmError: any error of training.
    """
    device = choose_device(recipe.runtime.device, settings)
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings)
    with ExitStack() as stack:
        run_dir = RunDir(folder / f"run-{len(os.listdir(folder))}").create()
        session = stack.enter_context(closing(Session(run_dir, watch_parent)))
        session.readers.append(TensorBoard(run_dir.tensorboard, session.context))
        steps, incidents = list[dict[str, Any]](), list[str]()
        session.readers.append(partial(_read, steps, incidents))  # also counts what is given up while loading
        start, family = StartContext(session, recipe, device, dtype, settings), family_for(recipe)
        if random_weights:
            cache = LatentCache(Path(recipe.cache.dir))
            data = pipeline.data_of(start, family, cache, synthetic(recipe, family, cache, text_chunks))
        else:
            data = pipeline.prepare_data(start, family)
        stack.enter_context(closing(data.workers))
        artifacts, position = pipeline.load(start, family, data)
        bench = Bench(start, data, artifacts, new_trainer(start, data, position, artifacts), steps, incidents)
        sizes = data.prepared.facts.bucket_counts
        compiler = compilation.for_run(recipe, device, sizes, session.context)
        with compilation.explained(compiler):
            first_pass(start, artifacts, bench.trainer, compiler)
        bench.closing = stack.pop_all()
    return bench


def _read(steps: list[dict[str, Any]], incidents: list[str], emitted: Event) -> None:
    """Keep the events of a run that the measurement needs."""
    event = emitted.to_json()
    if event["type"] == "step":
        steps.append(event)
    elif event["type"] == "incident":
        incidents.append(f"{event['kind']}: {event['detail']}, {event['action']}")
    elif event["type"] in ("notice", "change"):
        incidents.append(event["text"])


def synthetic(recipe: Recipe, family: ModelFamily, cache: LatentCache, text_chunks: int = 1) -> Prepared:
    """Write random cache entries for square images of the recipe's resolution, in the format of encoded ones.

    Raises:
        DataError: the resolution is smaller than one bucket step.
        StorageError: the entries cannot be written.
    """
    data, train = recipe.data, recipe.train
    square = image_shape(max(bucket_sizes(data.largest_resolution, data.bucket_step, max_aspect=1.0)))
    size_hw = square["h"], square["w"]
    example = family.example(square, 2)  # two, so that masks of padding are among them
    count = max(MIN_ITEMS, ROUNDS_OF_ITEMS * train.batch_size * train.gradient_accumulation_steps)
    entries = [encoder.entry for encoder in family.encoders()]
    for encoder in family.encoders():
        for number in range(count + 1):  # the last caption is the empty one
            rng = torch.Generator().manual_seed(number)
            tensors: Tensors = {
                name: _random(_longer(example[name][0], text_chunks), rng) for name in encoder.entry.tensors
            }
            cache.write_tensors(encoder.entry.name, _key(number), tensors, f"made-up entry {number}")
    items = tuple(
        Item(
            key=f"made-up-{number:04d}",
            geometry=Geometry(size_hw, size_hw, (0, 0), size_hw),
            shape=square,
            keys={e.name: ((_key(number), _key(count)) if e.has_captions else (_key(number),),) for e in entries},
            dropout_rate=data.caption_dropout_rate,
            content=((_key(number),),),
        )
        for number in range(count)
    )
    return Prepared(
        items,
        (),
        (),
        (),
        (),
        SampleStatistics({}, {square: count}, {}),
        lambda text: {},
        _cannot_repair,
        tuple(entries),
    )


def _key(number: int) -> str:
    return f"{number:02x}-made-up"


def _longer(example: torch.Tensor, text_chunks: int) -> torch.Tensor:
    """Text states [S, D] with ``text_chunks`` times the tokens; any other tensor as it is."""
    return example.repeat(text_chunks, 1) if example.ndim == 2 else example


def _random(example: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    if example.is_floating_point():
        return torch.randn(example.shape, generator=rng).to(example.dtype)
    if example.dtype is torch.bool:  # a mask that hides nothing
        return torch.ones_like(example)
    return torch.randint(0, 100, example.shape, generator=rng, dtype=example.dtype)


def _cannot_repair(kind: str, key: str, reason: str) -> None:
    raise StorageError(
        "cache-entry-damaged",
        "A cache entry that was written a moment ago is damaged.",
        where=reason,
        fix="Check the disk on which the system keeps temporary files, and the memory.",
    )
