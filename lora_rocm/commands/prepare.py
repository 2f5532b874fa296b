"""``lora-rocm prepare``: fill a recipe's caches, and compile and check the kernels of its step, without training.

A run afterwards starts as one that was started before. Worker, environment and supervisor are the same as in ``train``;
the run directory is temporary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lora_rocm.commands.output import Notify, unheard
from lora_rocm.errors import StoppedError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.foundation.files import temporary_folder, write_json
from lora_rocm.foundation.packages import require_packages
from lora_rocm.foundation.units import count_text, time_text
from lora_rocm.processes.process import Asked, OnEvent
from lora_rocm.recipe.load import load_recipe  # recipe: the user names it
from lora_rocm.rules import mitigation_store
from lora_rocm.rules.attention_refusal import require_fitting_attention
from lora_rocm.rules.eight_bit_refusal import require_eight_bit
from lora_rocm.rules.environment import environment_json, plan
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.event_types import DataEvent, Event, KernelsEvent
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import lock, selftest_runner, supervisor, tuning_runner, worker_process
from lora_rocm.supervisor.choose_run_dir import choose, settle

AGAIN = "lora-rocm prepare"


@dataclass(frozen=True)
class PrepareResult:
    """Result of ``lora-rocm prepare``.

    Attributes:
        cache: the folder of the caches.
        samples: number of samples in them.
        skipped: number of samples that cannot be used.
        buckets: number of samples of each size.
        kernels: number of kernels that were compiled and checked now; those checked before are not counted.
        seconds: time of the whole command.
        exit_code: of the command: 0, or 130 if it was stopped.
    """

    cache: Path
    samples: int
    skipped: int
    buckets: dict[str, int]
    kernels: int
    seconds: float
    exit_code: int


def prepare(
    recipe_path: str,
    overrides: Sequence[str] = (),
    registry: FamilyRegistry = FAMILIES,
    *,
    worker: str | None = None,
    notify: Notify = unheard,
    on_event: OnEvent = lambda event: None,
    asked: Asked | None = None,
) -> PrepareResult:
    """Encode a recipe's samples into its caches, and compile and check the kernels of its step.

    Args:
        recipe_path: the recipe.
        overrides: ``section.key=value``.
        registry: the available model families.
        worker: in place of the worker's module.
        notify: gets notices.
        on_event: gets each event of the worker and of the supervisor.
        asked: requests to stop; None: Ctrl-C, SIGTERM and the end of the terminal.

    Raises:
        LoraRocmError: any error, with a message for the user.
    """
    began = time.monotonic()
    # Check the recipe and the machine, as a run does
    loaded = load_recipe(recipe_path, overrides, registry)
    for notice in loaded.notices:
        notify(notice)
    loaded.require_files(False)
    require_packages()
    situation = situation_here(loaded.recipe)
    require_fitting_attention(situation)
    require_eight_bit(situation)
    situation = selftest_runner.ensure(situation, loaded.recipe, notify)
    require_eight_bit(situation, tested=True)
    # Run the worker in a temporary run directory
    data, checked = list[DataEvent](), list[KernelsEvent]()

    def heard(event: Event) -> None:
        if isinstance(event, DataEvent):
            data.append(event)
        elif isinstance(event, KernelsEvent) and not event.kernel:
            checked.append(event)
        on_event(event)

    with temporary_folder() as folder:
        chosen = choose(loaded, folder / "run", None)
        run = chosen.run_dir.create()
        with lock.locked(run):
            settle(chosen, loaded, False)
            situation = supervisor.in_force(run, tuning_runner.ensure(run, situation, False, notify), notify)
            write_json(run.environment, environment_json(plan(situation), situation.facts), run.path)
            watched = supervisor.Supervisor(
                run,
                loaded.recipe,
                situation,
                partial(_command, run, worker),
                heard,
                notify,
                again=AGAIN,
                keep=partial(mitigation_store.keep, notify=notify),
                asked=asked,
            )
            try:
                code = watched.run()
            except StoppedError as error:
                code = error.exit_code
    found = data[-1] if data else None
    return PrepareResult(
        cache=Path(loaded.recipe.cache.dir),
        samples=found.samples if found else 0,
        skipped=len(found.set_aside) if found else 0,
        buckets={size: int(count) for size, count in found.buckets.items()} if found else {},
        kernels=sum(event.done for event in checked),
        seconds=round(time.monotonic() - began, 1),
        exit_code=code,
    )


def _command(
    run: RunDir, worker: str | None, checkpoint: Path | None, attempt: int, stacks_after_s: Mapping[str, float]
) -> list[str]:
    """Return the worker's command line (``supervisor.CommandBuilder``). There are no checkpoints."""
    command = worker_process.worker_command(run, checkpoint, False, attempt, stacks_after_s, worker)
    return [*command, worker_process.PREPARE]


def render(result: PrepareResult) -> str:
    """Return the result as text."""
    if result.exit_code:
        return "Stopped. The encoded entries are kept; the same command goes on from there."
    skipped = f", {result.skipped} skipped" if result.skipped else ""
    sizes = count_text(len(result.buckets), "bucket")
    checked = f"{count_text(result.kernels, 'kernel')} compiled and checked" if result.kernels else "No kernel to check"
    return (
        f"{count_text(result.samples, 'sample')} in {sizes} are in {result.cache}{skipped}. {checked}. "
        f"It took {time_text(result.seconds)}."
    )
