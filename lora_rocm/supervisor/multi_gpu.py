"""Training on several GPUs, from the parent's side: ``--gpus N`` on one machine, or one process of ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lora_rocm.errors import UserError
from lora_rocm.hardware.ranks import Rank, select_several
from lora_rocm.processes.process import Asked, OnEvent, stop_signals
from lora_rocm.recipe.load import LoadedRecipe
from lora_rocm.rules.environment import plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import worker_process as worker_process
from lora_rocm.supervisor.choose_run_dir import LATEST, Chosen, settle_rank
from lora_rocm.supervisor.tuning_runner import without
from lora_rocm.supervisor.worker_group import End, run_workers, verdict
from lora_rocm.supervisor.worker_process import Worker, follow


def with_gpus(situation: Situation, here: int, everywhere: int) -> Situation:
    """Return the situation with the GPUs of all processes that train together.

    here: number of processes on this machine.
    everywhere: number of processes on all machines.

    Raises:
        UserError: this machine has fewer than ``here`` GPUs.
    """
    if everywhere == 1:
        return situation
    on_cpu = situation.recipe is not None and situation.recipe.runtime.device == "cpu"
    selection = select_several(situation.facts, situation.environ, here, on_cpu=on_cpu)
    return replace(situation, selection=selection, ranks=everywhere)


def require_place(me: Rank, gpus: int | None, run_dir: Path | None, resume: str | None) -> None:
    """Check that a process that ``torchrun`` started has the options that it needs, and not --gpus.

    Raises:
        UserError: an option is missing or conflicts with ``torchrun``.
    """
    if gpus is not None:
        raise UserError(
            "gpus-twice",
            f"torchrun has started {me.size} processes, and --gpus would start more in each of them.",
            where=f"--gpus {gpus}, WORLD_SIZE={me.size}",
            fix="Remove --gpus: torchrun's --nproc-per-node sets the number.",
        )
    if run_dir is None and resume in (None, LATEST):
        raise UserError(
            "run-dir-needed",
            "Processes that torchrun starts need a common run directory.",
            where=f"rank {me.rank} of {me.size}",
            fix="Add --run-dir DIR --resume latest, which works for new and for resumed runs.",
        )


def run_unwatched(
    run_dir: RunDir,
    env: Mapping[str, str],
    on_event: OnEvent,
    command: Sequence[str],
    notify: Callable[[str], None],
    count: int,
    asked: Asked | None = None,
) -> int:
    """Start ``count`` workers without hang detection and restarts, and return their exit code.

    asked: requests to stop; None means Ctrl-C, SIGTERM and the closing of the terminal.

    Raises:
        LoraRocmError: the error of a worker that failed.
    """
    if count == 1:
        return worker_process.run_worker(run_dir, env, on_event, command, notify, asked)
    return run_workers(
        run_dir, env, count, lambda rank, event: None if rank else on_event(event), command, notify, asked
    )


def train_rank(
    me: Rank,
    loaded: LoadedRecipe,
    chosen: Chosen,
    situation: Situation,
    notify: Callable[[str], None],
    *,
    accept_changes: bool,
    worker: str | None = None,
) -> int:
    """Train in a process of ``torchrun`` that is not rank 0, and return the exit code.

    Rank 0 prepares and writes the run directory; this process only trains.

    Raises:
        LoraRocmError: the error of this rank's worker.
    """
    run_dir = chosen.run_dir.create()
    if not settle_rank(chosen, loaded, me.rank):
        return 0
    env = plan(without(situation)).applied_to(os.environ)
    command = worker_process.worker_command(run_dir, chosen.checkpoint, accept_changes, 0, None, worker)
    command += ["--recipe", str(run_dir.recipe_of(me.rank))]
    with stop_signals() as asked, ExitStack() as stack:
        child = stack.enter_context(Worker(run_dir, env, command, me.rank))
        follow([child], asked, lambda rank, event: None, notify)
        found = verdict([child])
    if isinstance(found, End):
        raise found.error
    return found
