"""The training process: ``python -m lora_rocm.train.worker RUN_DIR``. It only combines the parts and runs them.

Its input and output are in the run directory. Standard input is a pipe from the parent process: when it ends, the
parent has ended, so the worker saves and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import torch

from lora_rocm import BEGAN_S, __version__
from lora_rocm.device.backend_settings import apply
from lora_rocm.device.precision import choose_device, describe
from lora_rocm.device.process_group import World, join
from lora_rocm.device.torch_errors import settle, translated
from lora_rocm.errors import LoraRocmError, MachineError, StoppedError, StorageError, resume_advice
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import refuse_link
from lora_rocm.foundation.output_stream import outliving_stdout
from lora_rocm.foundation.packages import imported, versions_of
from lora_rocm.hardware.ranks import Rank, rank_of
from lora_rocm.hardware.settings import settings_from
from lora_rocm.memory.footprint_process import footprint_process
from lora_rocm.processes.process import stop_signals
from lora_rocm.recipe.comparison import shared_values
from lora_rocm.recipe.load import load_recipe  # recipe: the run's own, for its training
from lora_rocm.recipe.schema import Recipe
from lora_rocm.rules.mitigations import mitigation_table
from lora_rocm.rundir.event_types import Emit, EndEvent, ErrorEvent, PhaseEvent, StartEvent
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.recipe_file import recipe_to_train
from lora_rocm.train.opened_device import OpenedDevice
from lora_rocm.train.session import Session

if TYPE_CHECKING:
    from lora_rocm.train.checkpoint import Checkpoint

IMPORTS_MORE = True
"""``main`` imports further packages and reports the end of the imports itself (``foundation.packages.imported``)."""
ORPHAN_LOCK_WAIT_S = 60.0
PACKAGES = ("diffusers", "peft", "transformers", "triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")
"""Packages, in addition to torch, that a step's results depend on. Some torch wheels rename Triton."""


def main(arguments: list[str] | None = None, registry: FamilyRegistry = FAMILIES) -> int:
    """Lock the run directory, train, and convert every error to an event; return the exit code."""
    parser = argparse.ArgumentParser(prog="lora_rocm.train.worker")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="resume from this checkpoint folder instead of the newest")
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume even if recipe, data or base model have changed"
    )
    parser.add_argument(
        "--attempt", type=int, default=0, help="number that selects the noise; each number gives other noise"
    )
    parser.add_argument(
        "--stacks-after",
        type=json.loads,  # json: the supervisor's own text
        help="JSON: phase -> seconds of silence after which all stacks are written",
    )
    parser.add_argument("--prepare", action="store_true", help="fill the caches and check the kernels, then end")
    parser.add_argument("--began", type=float, help="when the command began, in seconds since the epoch")
    parser.add_argument("--recipe", type=Path, help="use this recipe instead of the run directory's (for torchrun)")
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run_dir)
    session: Session | None = None
    me = Rank()
    try:
        me = rank_of(os.environ)
        if options.recipe is None:
            run_dir.require()
        refuse_link(run_dir.lock_of(me.rank))
        # writes: refuse_link comes before it; opened without following links, and nothing is written
        lock = filelock.FileLock(run_dir.lock_of(me.rank), timeout=ORPHAN_LOCK_WAIT_S)
        # A signal to the whole job also reaches the parent, which decides and asks this process by the file "stop".
        with stop_signals(), outliving_stdout(), lock:
            session = Session(run_dir, watch_parent=True, stacks_after_s=options.stacks_after, rank=me.rank)
            recipe = load_recipe(options.recipe or recipe_to_train(run_dir), registry=registry).recipe
            return _train(session, recipe, options, me)
    except filelock.Timeout:
        print(f"another worker still holds {run_dir.path}", file=sys.stderr, flush=True)  # noqa: T201 - worker.log
        return MachineError.exit_code
    except Exception as error:  # edge: recorded as an event, and the traceback in worker.log
        traceback.print_exc()
        explained = _explained(error, run_dir, me)
        with contextlib.suppress(StorageError):  # a full disk has no room for the event
            run_dir.require()
            emit: Emit = session.emit if session is not None else EventWriter(run_dir.events(me.rank)).write
            emit(ErrorEvent(**explained.to_event()))
        settle()
        return explained.exit_code
    finally:
        if session is not None:
            with contextlib.suppress(OSError):  # closing retries what a full disk refused, which was reported
                session.close()


def _explained(error: Exception, run_dir: RunDir, me: Rank) -> LoraRocmError:
    unknown = MachineError(
        "internal",
        f"The training process failed with an unexpected error: {type(error).__name__}: {error}",
        where=f"traceback in {run_dir.log_of(me.rank)}",
        **resume_advice("Please report it with that log attached. Then run the same command with --resume latest."),
    )
    return translated(error, run_dir.path, unknown)


def _train(session: Session, recipe: Recipe, options: argparse.Namespace, me: Rank) -> int:
    settings = settings_from(os.environ)
    mitigation_table()  # read now: after a failure there may be no memory to read it with
    # Set up the device, torch and the process group
    device = choose_device(recipe.runtime.device, settings, me.local_rank)
    if recipe.runtime.threads:
        torch.set_num_threads(recipe.runtime.threads)
    if recipe.runtime.deterministic:
        torch.use_deterministic_algorithms(True)
    apply(settings, device, wakes_later=True)
    # Start to count the step's memory and to open the device, which take as long as the imports below
    counting = None
    if me.rank == 0:
        recipe_file = options.recipe or recipe_to_train(session.run_dir)
        counting = footprint_process(recipe_file, recipe.cache.dir, device.type == "cuda")
    if counting is not None:
        session.at_close.callback(counting.close)
    opening = OpenedDevice(device, settings, recipe, session.context)
    # Heavy imports, only once the lock is held and errors can be recorded
    from lora_rocm.families.base import family_for
    from lora_rocm.train import pipeline, resume
    from lora_rocm.train.context import StartContext

    family_for(recipe)
    imported()
    if options.began is not None:
        session.emit(PhaseEvent(phase="command", state="end", seconds=round(BEGAN_S - options.began, 3)))
    session.emit(PhaseEvent(phase="imports", state="end", seconds=round(time.time() - BEGAN_S, 3)))
    # Find the checkpoint and announce the start
    with session.phase("start"):
        dtype = opening.dtype()
        if me.size > 1:
            opening.settings()  # nothing else uses the device while the ranks open their connection
        world = join(me, device, session.context.beat)
        checkpoint = resume.find_checkpoint(session, options.checkpoint)
    session.emit(
        StartEvent(
            pid=os.getpid(),
            device=describe(device),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            precision=str(dtype).removeprefix("torch."),
            resumed_from=checkpoint.position.updates if checkpoint else None,
        )
    )
    _require_same(world, recipe, dtype, checkpoint)
    # Train
    start = StartContext(
        session, recipe, device, dtype, settings, checkpoint, options.accept_changes, options.attempt, world, counting
    )
    if options.prepare:
        pipeline.prepare_without_training(start, opening)
        finished, updates = True, 0
    else:
        finished, updates = pipeline.train(start, opening)
    world.close()
    code = 0 if finished else StoppedError.exit_code
    session.emit(EndEvent(reason="done" if finished else "stopped", updates=updates, exit_code=code))
    if device.type == "cuda":
        torch.cuda.synchronize()  # Windows: leaving with kernels in flight hangs (pytorch#160759)
    return code


def _require_same(world: World, recipe: Recipe, dtype: torch.dtype, checkpoint: Checkpoint | None) -> None:
    """Check that recipe, software and checkpoint are the same on all ranks.

    Raises:
        UserError: their recipes, versions, dtypes or checkpoints differ.
    """
    values = {key: json.dumps(value, ensure_ascii=False) for key, value in shared_values(recipe).items()}
    place = f"{checkpoint.path.name} {checkpoint.digest}" if checkpoint else "the beginning"
    world.require_same("the recipe", values)
    versions = {"lora-rocm": __version__, "torch": torch.__version__, **versions_of(PACKAGES)}
    world.require_same("software", {**versions, "precision": str(dtype)})  # also if only one rank has a package
    world.require_same("the run directory", {"the checkpoint to resume from": place})


if __name__ == "__main__":
    sys.exit(main())
