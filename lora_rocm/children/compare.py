"""Child process of ``lora-rocm compare``: compares images and held-out losses of a run's LoRA files.

The base model is loaded only once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lora_rocm.adapters import new_tokens, trained_norms
from lora_rocm.adapters.attach import inject
from lora_rocm.adapters.base import Adapter
from lora_rocm.adapters.lora_files.lora_reader import read_for_model
from lora_rocm.adapters.training_adapter import attach_training_adapter
from lora_rocm.device.precision import compute_dtype
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import AdapterError, DataError
from lora_rocm.families.base import Drawn, LoadedModel, ModelFamily, family_for, prompt_notices_of
from lora_rocm.families.objectives.loss import measured
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import write_atomic
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import BatchPlan, Prepared, SampleStatistics, loader, open_workers, prepare
from lora_rocm.processes.jobs import CompareJob
from lora_rocm.recipe.adapter_sections import NewToken
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.event_types import ComparedEvent
from lora_rocm.rundir.events import emit
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.run_context import RunContext
from lora_rocm.supervisor.run_recipe import recipe_of_run
from lora_rocm.train.base_seal import require_trained_base
from lora_rocm.train.checkpoint import latest_valid
from lora_rocm.train.held_out import HeldOut, HeldOutLoss
from lora_rocm.train.preview import ENDINGS, content_of, requests_of
from lora_rocm.train.standalone import open_placement, start_device
from lora_rocm.train.start_encoder import start_encoders

CONTEXT = RunContext(emit=emit)


def compare(job: CompareJob, registry: FamilyRegistry = FAMILIES) -> None:
    """Emit one ``ComparedEvent`` for the base model alone, and one for each (updates, path) in ``job.files``.

    The prompts are ``job.prompts``, or the recipe's if these are empty. Images are written to ``job.output``.
    """
    # The recipe, the held-out samples and the prompts in the cache
    recipe = recipe_of_run(RunDir(job.source).recipe, registry, job.spare_cache)
    if job.prompts:
        recipe = recipe.model_copy(update={"sample": recipe.sample.only(job.prompts)})
    device, settings = start_device(recipe)
    family, placement = family_for(recipe), open_placement(device, settings)
    transfer = placement.transfer
    cache = LatentCache(Path(recipe.cache.dir))
    opened_placement = partial(open_placement, settings=settings)
    dtype = compute_dtype(recipe.train.mixed_precision, device, settings, recipe.spec.takes_fp16)
    more = start_encoders(recipe, family, dtype)
    prepared = _prepared(
        recipe, family, Encoding(cache, device, context=CONTEXT, opened_placement=opened_placement, more=more)
    )
    for text in prompt_notices_of(family) if recipe.sample.prompts else ():
        CONTEXT.notice(text)
    # The model, and the weights of each file, read on the CPU
    model = family.load(dtype, torch.device("cpu"))
    newest, _ = latest_valid(RunDir(job.source))
    require_trained_base(newest, recipe.model.name_or_path, family, CONTEXT.notice)
    adapter = inject(family, model, recipe.lora.as_written(), recipe.train.seed, CONTEXT.notice, resumed=True)
    training_adapter = attach_training_adapter(family, model, recipe.model.training_adapter, CONTEXT.notice)
    tokens = recipe.lora.new_tokens
    states = _states(family, model, adapter, job.files, tokens)
    new_tokens.start(family, model, tokens)
    model.place(placement)
    family.fuse(model, triton=False)
    # Losses and images of each
    held_out = HeldOutLoss(family, model, transfer, partial(measured, family, model), CONTEXT)
    requests = requests_of(recipe)
    compared = (0, *states)
    for updates in compared:
        if updates:
            sent = {name: transfer.send_checked(tensor, name) for name, tensor in states.pop(updates).items()}
            adapter.load(sent)
        with nullcontext() if updates else adapter.disabled():
            found = mean_losses(held_out.of(_held_out_batches(recipe, family, cache, prepared)))
            drawn = list[Drawn]()  # all requests at the first strength, then at the next
            with training_adapter.absent():
                for strength in (job.strengths if updates else (1.0,)) if requests else ():
                    with adapter.scaled(strength):
                        asked = [replace(request, lora_scale=strength) for request in requests]
                        drawn += family.preview(model, asked, prepared.text_lookup)
        images = [job.output / f"{updates}-{number}.{ENDINGS[recipe.spec.preview]}" for number in range(len(drawn))]
        for path, preview in zip(images, drawn, strict=True):
            write_atomic(path, content_of(preview))
        emit(ComparedEvent(updates=updates, total=len(compared), losses=found, images=[*map(str, images)]))


def _prepared(recipe: Recipe, family: ModelFamily, encoding: Encoding) -> Prepared:
    """Return the run's prepared data.

    It has only prompts if nothing is held out, or if the images can no longer be used.
    """
    if recipe.data.validation_split:
        try:
            return prepare(recipe, family, encoding)
        except DataError as error:
            CONTEXT.notice(f"No held-out losses: {error.what} ({error.where}) {error.fix}")
    return prepare(recipe, family, encoding, SampleStatistics({}, {}, {}))


def _states(
    family: ModelFamily,
    model: LoadedModel,
    adapter: Adapter,
    files: Sequence[tuple[int, Path]],
    tokens: Sequence[NewToken],
) -> dict[int, dict[str, Tensor]]:
    """Return the trained tensors of each file, keyed by the number of updates.

    Missing and damaged files are skipped with a notice.

    Raises:
        AdapterError: no file can be read. The first file's error is raised.
    """
    states, faults = dict[int, dict[str, Tensor]](), list[AdapterError]()
    for updates, path in files:
        try:
            states[updates] = _state(family, model, adapter, Path(path), tokens)
        except AdapterError as error:
            faults.append(error)
            CONTEXT.notice(f"Step {updates} is skipped: {error.what} ({error.where})")
    if faults and not states:
        raise faults[0]
    return states


def _state(
    family: ModelFamily, model: LoadedModel, adapter: Adapter, path: Path, tokens: Sequence[NewToken]
) -> dict[str, Tensor]:
    """Return the trained tensors of a LoRA file and of the embedding files next to it, on the CPU."""
    if tokens:
        new_tokens.start(family, model, new_tokens.tokens_next_to(path, tokens)[: len(tokens)])
    norms = dict[str, Tensor]() if adapter.norms else None
    adapter.start_from(read_for_model(family, model, path, CONTEXT.notice, norms)[1])
    if norms is not None:
        trained_norms.fill(family, model, norms, path)
    return adapter.state()


def _held_out_batches(recipe: Recipe, family: ModelFamily, cache: LatentCache, prepared: Prepared) -> Iterator[Batch]:
    """Yield the held-out samples in batches of one, to save memory."""
    if prepared.held_out:
        workers = open_workers(cache, prepared.entries, recipe.runtime.model_copy(update={"workers": 0}), CONTEXT)
        plan = BatchPlan(prepared.held_out, 1, 1, recipe.train.seed)
        yield from loader(plan, family, workers, 0, plan.steps_per_epoch, repair=prepared.repair)


def mean_losses(found: Sequence[HeldOut]) -> dict[str, float | None]:
    """Return each sample's mean loss over the measured timesteps, keyed by sample key.

    A sample that an epoch repeats counts only once.

    The loss is weighted by the sample's share (``Item.share``), relative to the mean share. So the mean over
    samples equals training's held-out loss, which is a mean over all trained tokens.
    """
    of_sample, shares = defaultdict[str, list[float]](list), dict[str, int]()
    for each in found:
        of_sample[each.key].append(each.loss)
        shares[each.key] = each.share
    usual = sum(shares.values()) / max(len(shares), 1)
    return {key: sum(values) / len(values) * (shares[key] / usual) for key, values in of_sample.items()}
