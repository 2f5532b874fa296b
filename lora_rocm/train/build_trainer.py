"""Builds the trainer with its engine and hooks, and runs the first pass, which measures the step's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from lora_rocm.adapters.flat_params import FlatWeights
from lora_rocm.device.allocator import LimitFollower
from lora_rocm.device.attention import training_context
from lora_rocm.families.base import Tensors
from lora_rocm.kernels.adapter_dropout import DropoutDraws
from lora_rocm.loader.batch import Batch
from lora_rocm.loader.batches import BatchPlan, loader
from lora_rocm.memory.manager import MemoryManager
from lora_rocm.memory.oom_recovery import Relief
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rundir.checkpoint_record import Position
from lora_rocm.rundir.sample_losses import LossWriter
from lora_rocm.train import compilation
from lora_rocm.train.artifacts import Artifacts
from lora_rocm.train.context import Data, StartContext, captures, pins
from lora_rocm.train.engine import Engine
from lora_rocm.train.graphs import Graphs
from lora_rocm.train.hooks import CallEvery, Save, Validation
from lora_rocm.train.loop import Hook, SaveClock, Trainer
from lora_rocm.train.watched import Watched


def new_trainer(start: StartContext, data: Data, position: Position, artifacts: Artifacts) -> Trainer:
    """Return the trainer of a run, with its engine and hooks."""
    recipe, family, model = start.recipe, artifacts.family, artifacts.model
    train, pinned, steps_per_epoch = recipe.train, pins(start), data.plan.steps_per_epoch

    def open_batches(plan: BatchPlan, first: int, count: int | None) -> Iterator[Batch]:
        repair = data.prepared.repair
        return loader(plan, family, data.workers, first, count, pin_memory=pinned, repair=repair)

    # Hooks: canary, validation, checkpoints, previews
    hooks: list[Hook] = [CallEvery(recipe.runtime.canary_every_n_steps, artifacts.guard.check_kernels)]
    validation_steps, shown = train.validation_steps(steps_per_epoch), artifacts.shown_weights
    if validation_steps and data.prepared.held_out:
        held_out = BatchPlan(data.prepared.held_out, train.batch_size, 1, train.seed)
        hooks.append(Validation(validation_steps, lambda: open_batches(held_out, 0, held_out.steps_per_epoch), shown))
    if validation_steps and data.watched is not None:
        batches = _watched_batches(data.watched, recipe, pinned)
        hooks.append(Validation(validation_steps, batches, shown, data.watched.family))
    clock = SaveClock(minutes) if (minutes := recipe.output.save_every_minutes) else None
    hooks.append(Save(recipe.output.save_steps(steps_per_epoch), clock, lambda updates: artifacts.checkpoint(position)))
    # Engine, and previews, which need the memory of its graphs
    engine = _engine(start, artifacts)
    if recipe.sample.prompts:
        hooks.append(CallEvery(recipe.sample.round_steps(steps_per_epoch), artifacts.preview_once, engine.release))
    # The loop
    return Trainer(
        family=family,
        model=model,
        engine=engine,
        optimizer=artifacts.optimizer,
        transfer=artifacts.transfer,
        open_batches=lambda first: open_batches(data.plan, first, None),
        seed=train.seed,
        dropout=DropoutDraws(module for root in model.components.values() for module in root.modules()),
        position=position,
        relief=Relief(
            family,
            model,
            train.batch_size,
            artifacts.memory.parts,
            artifacts.memory.recomputes_all,
            start.context,
            artifacts.memory.again,
        ),
        context=start.context,
        world=start.world,
        limit=LimitFollower(start.device, start.settings, start.context.notice),
        hooks=hooks,
        steps_per_epoch=steps_per_epoch,
        clock=clock,
        losses=_loss_writer(start, position),
    )


def _loss_writer(start: StartContext, position: Position) -> LossWriter | None:
    """Return the open file of this rank's losses by sample; None for texts, which have no noise level."""
    session = start.session
    if start.recipe.spec.trains_on_texts:
        return None
    writer = LossWriter(session.run_dir.losses(session.rank), position.updates, start.context.notice)
    writer.begin()
    session.at_close.callback(writer.close)
    return writer


def _watched_batches(watched: Watched, recipe: Recipe, pinned: bool) -> Callable[[], Iterator[Batch]]:
    """Return a function that opens the batches of ``data.watched``; each call starts at the first batch."""
    plan, repair = BatchPlan(watched.prepared.held_out, recipe.train.batch_size, 1, 0), watched.prepared.repair
    end = plan.steps_per_epoch
    return lambda: loader(plan, watched.family, watched.workers, 0, end, pin_memory=pinned, repair=repair)


def first_pass(
    start: StartContext, artifacts: Artifacts, trainer: Trainer, compiler: compilation.Compiler | None
) -> None:
    """Run one pass of the largest shape to measure its memory, and change the memory plan if it does not fit.

    If there is a compiler, the model is compiled too.
    """
    memory, eager, weights = artifacts.memory, replace(trainer.engine, graphs=None), _weights(artifacts)
    trainer.limit.renew()

    def alone(batch: Tensors, draws: Tensors) -> None:
        _forget(weights, memory)
        eager.run(batch, draws)

    if compiler is not None:
        compilation.require_no_offload(compiler, memory.offload is not None)
        compiler.mark(artifacts.family, artifacts.model)
    memory.probe(artifacts.family, artifacts.model, artifacts.transfer, alone)
    if compiler is not None:
        rows = -(-start.recipe.train.batch_size // memory.parts)
        compilation.require_no_offload(compiler, memory.offload is not None)
        compiler.warm_up(compilation.zero_passes(artifacts.family, artifacts.transfer, rows, eager.run))
    _forget(weights, memory)
    trainer.relief.parts, trainer.relief.recomputes = memory.parts, memory.recomputes_all
    if not memory.captures:
        trainer.engine.graphs = None
        artifacts.guard.use_graphs(None)


def _weights(artifacts: Artifacts) -> FlatWeights:
    """The optimizer's flat weights, which also have the leaf tensors that the layers compute with."""
    weights = artifacts.optimizer.weights
    assert isinstance(weights, FlatWeights)
    return weights


def _forget(weights: FlatWeights, memory: MemoryManager) -> None:
    """Drop the gradients; allocate or free their buffer as the current memory plan requires."""
    weights.keep_gradients(memory.keeps_gradients)
    weights.drop_gradients()


def _engine(start: StartContext, artifacts: Artifacts) -> Engine:
    """Build the engine.

    It uses autocast if the adapter's dtype differs from the base's, and captures graphs if allowed.
    """
    model, weights, recipe = artifacts.model, _weights(artifacts), start.recipe
    mixed = model.dtype is not next(iter(weights.leaves.values())).dtype
    graphs = None
    if captures(start):
        graphs = Graphs(weights, recipe.runtime.deterministic, start.context)
    return Engine(
        artifacts.family,
        model,
        weights,
        artifacts.optimizer.loss_scale,
        lambda: torch.autocast(model.device.type, model.dtype if mixed else torch.bfloat16, enabled=mixed),
        graphs,
        training_context(start.settings.attention) or nullcontext,
    )
