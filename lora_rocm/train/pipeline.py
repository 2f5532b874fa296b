"""One run from samples to exported files, in phases. Each phase can be killed and repeated."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from lora_rocm.checks.canary import Canary
from lora_rocm.checks.graph_check import capture_on_gpu
from lora_rocm.checks.kernel_choice import FACT
from lora_rocm.checks.kernel_processes import KernelCompilers
from lora_rocm.dataset.order.update_note import larger_updates_note
from lora_rocm.device.encoder_speed import first_time
from lora_rocm.device.precision import FLOATS
from lora_rocm.encoded_cache.cache import LatentCache
from lora_rocm.encoded_cache.encode_session import Encoding
from lora_rocm.errors import DataError
from lora_rocm.families.base import ModelFamily, family_for
from lora_rocm.foundation.units import count_text
from lora_rocm.kernels.backend import available, hash_triton
from lora_rocm.loader.batches import BatchPlan, Prepared, open_workers, prepare
from lora_rocm.optim.base import GatedOptimizer
from lora_rocm.optim.schedule import length_text
from lora_rocm.recipe.process_sections import RuntimeSection
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.event_types import DataEvent, StepEvent
from lora_rocm.rundir.events import latest_steps
from lora_rocm.rundir.layout import SUPERVISOR
from lora_rocm.rundir.recipe_file import accept
from lora_rocm.train import compilation, dry_run, resume
from lora_rocm.train.artifacts import Artifacts
from lora_rocm.train.base_seal import identities, seals_of
from lora_rocm.train.build_trainer import first_pass, new_trainer
from lora_rocm.train.checkpoint import Checkpoint, discard_newer, restore_threads
from lora_rocm.train.class_images import with_class_images
from lora_rocm.train.context import Data, StartContext, captures, encoder_placement, transfer_of
from lora_rocm.train.disk_forecast import CacheRoom, DiskForecast
from lora_rocm.train.dry_run import TakesSource
from lora_rocm.train.early_base import keep_trained, read_base_early
from lora_rocm.train.guard import CacheGuard, Guard
from lora_rocm.train.hooks import TensorBoard, Validation
from lora_rocm.train.input_start import start_from_inputs
from lora_rocm.train.load_model import choose_kernels, choose_memory, compilers_of, kernels_fact, load_model, read_model
from lora_rocm.train.lost_images import DataOfCheckpoint, data_of_checkpoint
from lora_rocm.train.opened_device import OpenedDevice
from lora_rocm.train.start_encoder import start_encoders
from lora_rocm.train.usable import require_startable, require_usable
from lora_rocm.train.watched import prepare_watched


def train(start: StartContext, opened: OpenedDevice | None = None) -> tuple[bool, int]:
    """Run all phases; return whether training is complete, and the number of updates made.

    ``opened``: tests attention while the base is checked. The settings of ``start`` are replaced by its settings.
    """
    session, recipe, checkpoint = start.session, start.recipe, start.checkpoint
    if start.world.is_first:
        board = TensorBoard(session.run_dir.tensorboard, start.context, session.run_dir.events(SUPERVISOR))
        session.readers.append(board)
        session.at_close.callback(board.close)
    if checkpoint is not None and recipe.runtime.threads is None and restore_threads(checkpoint):
        start.context.notice(
            f"Using {torch.get_num_threads()} CPU threads, as the checkpoint did, because this affects rounding."
        )
    family = family_for(recipe)
    compilation.how_asked(recipe.runtime.compile, start.device)  # refuse before anything is encoded
    if checkpoint is not None and not start.accept_changes:
        checkpoint.require_ranks(start.world.size)
    # Caches, then base model, adapter and optimizer
    with ExitStack() as until_loaded:
        with session.phase("cache"):
            # A resumed run has computed with its base before, unless the base may have changed
            is_checked = checkpoint is None or start.accept_changes
            if is_checked:
                start.world.first("the base's files", family.examine)
            compilers = until_loaded.enter_context(_begin_helpers(start))
            read_trained = read_base_early(start, family)
            if is_checked:
                start.world.first("the base", lambda: _require_trainable(start, family))
            read_trained()
            start = _with_tested_attention(start, opened)
            data = start.world.in_turn("caches", lambda: prepare_data(start, family))
            keep_trained(start, family)
            start.world.require_same("the training data", {"samples": data.identity()})
        with session.phase("load"):
            artifacts, position = load(start, family, data, compilers)
            if compilers is not None:
                compilers.wait_for_step(lambda: start.context.beat("load"))
    # Train
    finished = position.updates >= data.max_train_steps  # only the result is missing
    if position.updates > data.max_train_steps:
        start.context.notice(
            f"The checkpoint was written at step {position.updates}, beyond the recipe's "
            f"{count_text(data.max_train_steps, 'step')}: the result is exported from the checkpoint."
        )
    if finished:
        data.workers.close()
        artifacts.checkpoint(position)  # a kill may have come before older ones were rotated away
    else:
        _notify_other_length(start, position.updates, data.max_train_steps)
        finished = _fit(start, data, position, artifacts)
    if finished:
        with session.phase("export"):
            start.world.first("export", lambda: artifacts.finish(position))
    return finished, position.updates


def prepare_without_training(start: StartContext, opened: OpenedDevice | None = None) -> None:
    """Fill the caches, and compile and check the kernels of the largest step, as ``train`` would."""
    session, family = start.session, family_for(start.recipe)
    compilation.how_asked(start.recipe.runtime.compile, start.device)
    with ExitStack() as until_loaded:
        with session.phase("cache"):
            family.examine()
            compilers = until_loaded.enter_context(_begin_helpers(start))
            _require_trainable(start, family)
            start = _with_tested_attention(start, opened)
            data = prepare_data(start, family)
        data.workers.close()
        with session.phase("load"):
            memory = choose_memory(start, family, data.prepared.facts.bucket_counts)
            choose_kernels(start, memory, compilers, waits=True)
            if compilers is not None:
                compilers.wait_for_step(lambda: start.context.beat("load"))


def _begin_helpers(start: StartContext) -> AbstractContextManager[KernelCompilers | None]:
    """Let the counting process count and a thread hash Triton, and return a context with processes that compile.

    The context has no processes if this start needs none.

    They work while the base is checked. Call this only when its files are there: a download may take hours.
    """
    if available(start.device):
        if start.settings.triton:
            hash_triton()
        if start.counting is not None:  # the process sees no GPU, and counts Triton kernels
            start.counting.ask(start.count_request)
    return compilers_of(start)


def _with_tested_attention(start: StartContext, opened: OpenedDevice | None) -> StartContext:
    """Wait for the test of attention. Where it changes the settings, count the memory again for them."""
    if opened is not None:
        with start.session.phase("attention"):  # a test that hangs is ended sooner than an encoder that is loaded
            start = replace(start, settings=opened.settings())
    if start.counting is not None:
        counting = start.counting.asked_for(start.count_request)
        if counting is not start.counting:
            start.session.at_close.callback(counting.close)
            start = replace(start, counting=counting)
    return start


def _require_trainable(start: StartContext, family: ModelFamily) -> None:
    """Refuse a base or a LoRA file that cannot be trained. A resumed run does not read the files of its beginning."""
    recipe, accepted = start.recipe, Path(start.recipe.cache.dir) / "accepted_bases.json"
    dry_run.recall(accepted)
    base = require_usable(family, recipe)
    if start.checkpoint is None:
        key = _adapters_key(start, family)
        if key not in dry_run.VERDICTS:
            require_startable(family, recipe, base.skeletons, start.dtype)
            if key:
                dry_run.VERDICTS[key] = None
    dry_run.remember(accepted)


def _adapters_key(start: StartContext, family: ModelFamily) -> str:
    """Return a key for the acceptance of a recipe's adapters; "" if it depends on further files.

    Vectors of new tokens are from embedding files, or from the tokenizer.
    """
    recipe = start.recipe
    reads_files = recipe.lora.init_from or recipe.model.training_adapter or recipe.lora.new_tokens
    if reads_files or not isinstance(family, TakesSource):
        return ""
    sections = (section.model_dump_json() for section in (recipe.model, recipe.lora))
    return dry_run.key_of(family.source, recipe, *sections, str(start.dtype))


def _notify_other_length(start: StartContext, updates: int, max_train_steps: int) -> None:
    """Send a notice if the run's length has changed and its schedule depends on it."""
    made = [step for step in latest_steps(start.session.run_dir.events()) if step.updates <= updates]
    if made and (text := length_text(start.recipe.optim, updates, made[-1].max_train_steps, max_train_steps)):
        start.context.notice(text)


def _fit(start: StartContext, data: Data, position: Position, artifacts: Artifacts) -> bool:
    """Train until the last update (returns True) or a stop (returns False), then write a checkpoint."""
    session, recipe = start.session, start.recipe
    trainer = new_trainer(start, data, position, artifacts)
    start.world.first("previews", lambda: artifacts.before_training(position))
    watching = first_time(start.device, "The first step", start.context.notice)
    compiler = compilation.for_run(recipe, start.device, data.prepared.facts.bucket_counts, start.context)
    with closing(data.workers), compilation.explained(compiler):
        if compiler is not None:
            with session.phase("compile"):  # takes minutes: the limits of a step must not apply
                first_pass(start, artifacts, trainer, compiler)
        start.world.exchange("compiled", limit_s=None)  # one rank may have to compile what another has in its cache
        with session.phase("step"), watching as seen:
            session.readers.append(lambda event: seen() if isinstance(event, StepEvent) else None)
            if compiler is None:
                first_pass(start, artifacts, trainer, compiler)
            if position.updates == 0:
                for hook in trainer.hooks:
                    if isinstance(hook, Validation) and hook.watched is not None:
                        hook.act(trainer)
            finished = trainer.fit(data.max_train_steps)
    artifacts.checkpoint(position)
    trainer.engine.release()  # the last previews need the memory
    return finished


def load(
    start: StartContext, family: ModelFamily, data: Data, compilers: KernelCompilers | None = None
) -> tuple[Artifacts, Position]:
    """Move base model, adapter and optimizer to the device, restore the checkpoint, and check the kernels."""
    session, recipe, checkpoint = start.session, start.recipe, start.checkpoint
    # Model, adapter and optimizer
    transfer = transfer_of(start)
    read = cache(partial(read_model, start, family))
    memory = choose_memory(start, family, data.prepared.facts.bucket_counts, meanwhile=read)
    model, adapter, training_adapter, kernels = load_model(start, family, transfer, memory, compilers, read)
    if checkpoint is None and (text := recipe.lora.unstarted_text(adapter.unstarted(recipe.lora))):
        start.context.notice(text)
    start_from_inputs(start, family, model, adapter, transfer, data, memory.parts)
    groups = adapter.groups(recipe.optim, recipe.lora)
    weights = adapter.flatten(start.dtype, FLOATS[recipe.lora.weight_dtype], groups)
    optimizer = GatedOptimizer(
        weights,
        groups,
        recipe.optim,
        max_train_steps=data.max_train_steps,
        ema_decay=recipe.train.ema_decay,
        use_loss_scale=start.dtype is torch.float16,
        triton=kernels.triton,
        limit=adapter.norm_limit(recipe.lora),
    )
    # Checkpoint: compare, then restore
    assert model.placement is not None, "load_model places it"
    position, seals = Position(), seals_of(model.placement.fingerprints())
    if checkpoint is not None:
        seals = resume.require_same_base_and_data(start, data, family, checkpoint, seals)
        position = resume.restore(checkpoint, transfer, adapter, optimizer)
    start.world.require_same("the base model", {"base model": family.base_facts()["identity"], **seals})
    if start.world.is_first:  # only when nothing can be refused later
        accept(session.run_dir)
        if checkpoint is not None:
            discard_newer(session.run_dir, position.updates)
    position.attempt = max(position.attempt, start.attempt)
    # Canary and guard
    capture = capture_on_gpu if captures(start) else None
    canary = Canary(start.device, start.dtype, recipe.lora.rank, model.placement, capture=capture)
    guard = Guard(canary, optimizer, start.context)
    guard.check_kernels(position.updates)
    guard.use_graphs(capture)
    artifacts = Artifacts(
        session=session,
        recipe=recipe,
        family=family,
        model=model,
        adapter=adapter,
        training_adapter=training_adapter,
        optimizer=optimizer,
        transfer=transfer,
        guard=guard,
        prepared=data.prepared,
        run_facts={**data.facts(), **identities(family), FACT: kernels_fact(start, kernels)},
        base_seals=seals,
        steps_per_epoch=data.steps_per_epoch,
        room=DiskForecast(session.run_dir, recipe, data.max_train_steps, start.context, data.steps_per_epoch),
        tiles=start.settings.preview_tiling,
        memory=memory,
        world=start.world,
    )
    return artifacts, position


def prepare_data(start: StartContext, family: ModelFamily) -> Data:
    """Find the samples and fill the caches. Missing or changed images are accepted if training is complete."""
    recipe = start.recipe
    for notice in family.notices:  # an unusable base model is refused here, before images are read
        start.context.notice(notice)
    cache = LatentCache(Path(recipe.cache.dir))
    updates = start.checkpoint.position.updates if start.checkpoint else 0
    encoding = Encoding(
        cache,
        start.device,
        report=CacheRoom(cache, start.context),
        context=start.context,
        tiles=start.settings.image_tiling,
        opened_placement=partial(encoder_placement, start),
        check=CacheGuard(recipe.lora.rank, updates, start.context),
        more=start_encoders(recipe, family, start.dtype),
    )
    # If training is complete, the checkpoint's facts can replace missing data
    kept = data_of_checkpoint(start.checkpoint, recipe, start.world.size)
    if kept is None or start.accept_changes:
        drawn = with_class_images(start, family, encoding)
        data = data_of(start, family, cache, prepare(drawn, family, encoding))
        return replace(data, watched=prepare_watched(recipe, encoding))
    try:
        prepared = prepare(with_class_images(start, family, encoding), family, encoding)
        if prepared.identity() == kept.identity:
            return data_of(start, family, cache, prepared)
        start.context.notice("The training data differ from the checkpoint's, but training is complete.")
        prepared = replace(prepared, items=(), held_out=(), facts=kept.facts)
    except DataError as error:
        start.context.notice(f"{error.what} Training is complete and no longer needs the data.")
        prepared = prepare(recipe, family, encoding, kept.facts)
    return _without_items(start, family, cache, prepared, kept)


def _without_items(
    start: StartContext, family: ModelFamily, cache: LatentCache, prepared: Prepared, kept: DataOfCheckpoint
) -> Data:
    """Return the data of a start that only writes the result, without items to train on."""
    train = start.recipe.train
    accumulation, order = train.gradient_accumulation_steps, order_of(start.checkpoint)
    plan = BatchPlan((), train.batch_size, accumulation, train.seed, **order)
    workers = open_workers(cache, prepared.entries, _runtime(start), start.context)
    return Data(prepared, plan, kept.max_train_steps, workers, kept)


def data_of(start: StartContext, family: ModelFamily, cache: LatentCache, prepared: Prepared) -> Data:
    """Create the batch plan and the loader workers, and emit the ``data`` event."""
    train = start.recipe.train
    ranks = (start.world.size, start.world.me.rank)
    plan = BatchPlan(
        prepared.items,
        train.batch_size,
        train.gradient_accumulation_steps,
        train.seed,
        *ranks,
        **order_of(start.checkpoint),
    )
    steps = train.num_steps(plan.steps_per_epoch)
    larger = larger_updates_note(train, plan.steps_per_epoch, plan.one_bucket_steps)
    start.context.emit(
        DataEvent(
            samples=len(prepared.items),
            set_aside=[problem.to_json() for problem in prepared.set_aside],
            notices=[*prepared.notices, *([larger] if larger else [])],
            buckets={str(shape): count for shape, count in prepared.facts.bucket_counts.items()},
            steps_per_epoch=plan.steps_per_epoch,
            max_train_steps=steps,
        )
    )

    workers = open_workers(cache, prepared.entries, _runtime(start), start.context)
    return Data(prepared, plan, steps, workers)


def order_of(checkpoint: Checkpoint | None) -> dict[str, bool]:
    """The arguments of ``BatchPlan`` that select the order of samples. A resumed run keeps its original order.

    Checkpoints of earlier versions do not record these arguments; their runs keep the earlier versions' order.
    """
    if checkpoint is None:
        return {"by_length": True, "one_bucket_updates": False}
    return {"by_length": checkpoint.facts.get("by_length", False), "one_bucket_updates": checkpoint.one_bucket_updates}


def _runtime(start: StartContext) -> RuntimeSection:
    """The recipe's runtime section, with at most as many loader workers as the settings allow."""
    runtime, most = start.recipe.runtime, start.settings.loader_workers
    return runtime if most is None else runtime.model_copy(update={"workers": min(runtime.workers, most)})
