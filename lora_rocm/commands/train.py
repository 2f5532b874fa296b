"""One training run in the parent process: recipe, directory, worker, report, and the next command."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lora_rocm import BEGAN_S
from lora_rocm.commands import sample_export
from lora_rocm.dataset.preview_images import require_preview_images
from lora_rocm.errors import LoraRocmError, MachineError, ResumeError, StoppedError, StorageError, UserError
from lora_rocm.families.registry import PRODUCT, Registry
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.names import name_key
from lora_rocm.foundation.packages import require_packages
from lora_rocm.foundation.terminal_text import printable, quoted
from lora_rocm.hardware.ranks import rank_of
from lora_rocm.hardware.wheels import NEWEST_TORCH, is_newer_than_run
from lora_rocm.recipe.load import LoadedRecipe, load_recipe, shipped_recipes
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.report.report import write_report
from lora_rocm.report.vram_spill import spill_bytes
from lora_rocm.rules import mitigation_store
from lora_rocm.rules.attention_refusal import require_fitting_attention
from lora_rocm.rules.environment import EnvPlan, environment_json, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.events import read_events
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.made_from import stale_exports
from lora_rocm.rundir.results import final_files, named_paths
from lora_rocm.supervisor import lock, multi_gpu, process, selftest_runner, supervisor, tuning_runner
from lora_rocm.supervisor.restart_policy import attempt_of
from lora_rocm.supervisor.resume import LATEST, Chosen, choose, holds_run, settle, withdraw
from lora_rocm.supervisor.telemetry import Telemetry
from lora_rocm.supervisor.trackers import Trackers, require_trackers
from lora_rocm.telemetry.cards import cards_of


def train(
    recipe_path: str,
    overrides: Sequence[str] = (),
    *,
    run_dir: Path | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    supervised: bool = True,
    gpus: int | None = None,
    registry: Registry = PRODUCT,
    worker: str | None = None,
) -> int:
    """Run ``lora-rocm train`` and return the exit code (0 done, 130 stopped).

    ``supervised``: restart a worker that fails or hangs. ``gpus``: number of GPUs that train together; None: one, or
    the number given by ``torchrun``. ``registry``: the available model families. ``worker``: see
    ``process.worker_command``; it must know the same families.

    Raises:
        LoraRocmError: any error, in words.
    """
    loaded = load_recipe(recipe_path, overrides, registry)
    for notice in loaded.notices:
        _say(notice)
    chosen = _choose(loaded, run_dir, resume)
    begun = chosen.resume and (chosen.run_dir.result.exists() or bool(chosen.run_dir.list_checkpoints()))
    _require_inputs(loaded, begun)
    me = rank_of(os.environ)
    here, everywhere, children = gpus or 1, gpus or 1, gpus or 1
    if me.size > 1:
        multi_gpu.require_place(me, gpus, run_dir, resume)
        here, everywhere, supervised = me.local_size, me.size, False
    situation = multi_gpu.with_gpus(situation_here(loaded.recipe), here, everywhere)
    require_fitting_attention(situation)
    if not me.is_first:
        how = (me, loaded, chosen, situation, _say)
        return multi_gpu.train_rank(*how, accept_changes=accept_changes, worker=worker)
    if not holds_run(chosen.run_dir):  # refuses an unusable GPU before any file is made
        situation = selftest_runner.ensure(situation, loaded.recipe, _say)
    run = chosen.run_dir.create()
    with lock.locked(run):
        lock.end_leftover(run, _say, worker=worker)
        if not settle(chosen, loaded, accept_changes):
            _say_names_kept(run, loaded)
            _leave_complete(run, loaded)
            return 0
        _say_names_kept(run, loaded)
        again = resume_command(recipe_path, overrides, run) + (f" --gpus {gpus}" if gpus else "")
        again += " --accept-changes" if accept_changes else ""
        return _train_in(
            run,
            loaded,
            chosen,
            again,
            situation,
            accept_changes=accept_changes,
            supervised=supervised,
            children=children,
            worker=worker,
        )


def _say_names_kept(run: RunDir, loaded: LoadedRecipe) -> None:
    """Say so if the files of a resumed run are not named by ``output.name``."""
    asked = loaded.recipe.output.name
    if name_key(asked) != run.name:
        where = loaded.layers.where(("output", "name"))
        _say(
            f"{where}: the files of this run keep their name, {run.lora.name}. The title in them is {printable(asked)}."
        )


def _leave_complete(run: RunDir, loaded: LoadedRecipe) -> None:
    """Write missing result files of a complete run again, and print its location."""
    made_again = sample_export.make_again(run, loaded.recipe, _say)
    _say(f"This run is complete: {_results(run)}")
    _say_next(run, loaded)
    if made_again or not run.report.exists():  # or the parent was killed before it wrote the report
        _report(run, loaded.registry)


def demo(family: str | None = None) -> int:
    """Run ``lora-rocm demo``: train a demo's recipe that ships with the program, demo.yaml or that of a family.

    Raises:
        LoraRocmError: the family has no demo, or as ``train``.
    """
    shipped = shipped_recipes()
    if family is None:
        return train(str(shipped["demo.yaml"]))
    demos = {load_recipe(path).recipe.model.family: path for name, path in shipped.items() if name.startswith("demo")}
    if family not in demos:
        what, fix = "There is no demo of this family.", f"Give one of {', '.join(sorted(demos))}."
        raise UserError("no-demo", what, where=f"--family {printable(family)}", fix=fix)
    return train(str(demos[family]))


def _train_in(
    run: RunDir,
    loaded: LoadedRecipe,
    chosen: Chosen,
    again: str,
    situation: Situation,
    *,
    accept_changes: bool,
    supervised: bool,
    children: int,
    worker: str | None,
) -> int:
    situation = selftest_runner.ensure(situation, loaded.recipe, _say)
    situation = supervisor.in_force(run, tuning_runner.ensure(run, situation, accept_changes, _say), _say)
    env_plan = plan(situation)
    write_json(run.environment, environment_json(env_plan, situation.facts), run.path)
    for sentence in machine_notices(situation, env_plan):
        _say(sentence)
    _say(f"Run directory: {run.path}")
    # run the worker, supervised or not
    stopped: StoppedError | None = None
    command = _commands(run, accept_changes, worker)
    spill = spill_bytes(situation.facts, situation.selection, loaded.recipe.runtime.device)
    with (
        make_progress(spill_bytes=spill, events=run.events()) as progress,
        Trackers(run, loaded.recipe.output, progress.say) as trackers,
    ):
        on_event = trackers.passing(progress.on_event)
        try:
            if supervised:
                code = supervisor.Supervisor(
                    run,
                    loaded.recipe,
                    situation,
                    command,
                    on_event,
                    progress.say,
                    checkpoint=chosen.checkpoint,
                    again=again,
                    keep=partial(mitigation_store.keep, say=progress.say),
                    size=children,
                    telemetry=_telemetry(situation, loaded.recipe, children),
                ).run()
            else:
                attempt = attempt_of(read_events(run.events(SUPERVISOR)))
                env, line = env_plan.applied_to(os.environ), command(chosen.checkpoint, attempt)
                code = multi_gpu.run_unwatched(run, env, on_event, line, progress.say, children)
        except StoppedError as error:
            code, stopped = error.exit_code, error
        except LoraRocmError as error:
            with contextlib.suppress(StorageError):  # the user has to see the original error
                write_report(run, loaded.registry)
            if isinstance(error, MachineError) and again not in error.fix:
                progress.say(f"What is done so far is kept. When the cause is gone, go on with:\n  {again}")
            raise
        finally:
            withdraw(run)
    _tell_end(run, loaded, code, stopped, again)
    _report(run, loaded.registry)
    return code


def _telemetry(situation: Situation, recipe: Recipe, count: int) -> Telemetry:
    """Return what watches the GPUs of ``count`` workers."""
    if not recipe.runtime.telemetry:
        return Telemetry()
    device = recipe.runtime.device
    return Telemetry(cards_of(situation.facts, situation.selection, situation.environ, device, count))


def _commands(run: RunDir, accept_changes: bool, worker: str | None) -> Callable[..., list[str]]:
    """Return what makes the command line of each start of the worker (``supervisor.Command``)."""
    beginnings = [BEGAN_S]  # of the first start; a restart begins when it is made

    def command(
        checkpoint: Path | None, attempt: int = 0, stacks_after_s: Mapping[str, float] | None = None
    ) -> list[str]:
        began_s = beginnings.pop() if beginnings else time.time()
        return process.worker_command(run, checkpoint, accept_changes, attempt, stacks_after_s, worker, began_s)

    return command


def _tell_end(run: RunDir, loaded: LoadedRecipe, code: int, stopped: StoppedError | None, again: str) -> None:
    if stopped is not None:
        _say(stopped.what)
    if code == StoppedError.exit_code:
        _say(f"Stopped. Go on with:\n  {again}")
    elif code == 0:
        _say(f"Done. The LoRA: {_results(run)}")
        _say_next(run, loaded)


def _results(run: RunDir) -> str:
    """Paths of the finished files, or of the run if there are none, and a line for each file of an earlier step."""
    stale = stale_exports(run).values()
    old = {each.path for each in stale}
    paths = named_paths(path for path in final_files(run) if path not in old) or [run.path]
    return "\n".join([", ".join(map(str, paths)), *(each.sentence for each in stale)])


def _say_next(run: RunDir, loaded: LoadedRecipe) -> None:
    """Name the command that tries a finished run, if there is one."""
    if loaded.recipe.spec.trains_on_texts:
        _say(f"Talk to it:\n  {quoted(['lora-rocm', 'chat', str(run.path)])}")


def _report(run: RunDir, registry: Registry) -> None:
    """Write the report and print its path. A failure does not change the run's exit code."""
    try:
        _say(f"Report: {write_report(run, registry)}")
    except (ResumeError, StorageError) as error:
        _say(f"The report could not be written; later: lora-rocm report {quoted([str(run.path)])}\n{error}")


def machine_notices(situation: Situation, env_plan: EnvPlan) -> list[str]:
    """Return what the user must know about the machine before a run starts; ``doctor`` reports the rest."""
    said = [
        f"Warning: {warning.variable}={warning.value} is set here and is kept. {warning.what} (lora-rocm doctor)"
        for warning in env_plan.warnings
        if warning.level != "note"
    ]
    said += [
        f"{row.variable}={row.replaced} was set here; training gets {row.value} instead. (lora-rocm env --explain)"
        for row in env_plan.rows
        if row.replaced is not None
    ]
    torch, recipe = situation.facts.torch, situation.recipe
    on_cpu = recipe is not None and recipe.runtime.device == "cpu"
    gpus = [gpu for gpu in situation.facts.gpus if gpu.vendor in ("amd", "nvidia")]
    if gpus and torch is not None and torch.hip is None and torch.cuda is None and not on_cpu:
        said.append(
            f"Warning: this PyTorch ({torch.version}) is one for the CPU and cannot use the {gpus[0].name}. "
            "Training on the CPU. (lora-rocm doctor says how to get the right one)"
        )
    if torch is not None and is_newer_than_run(torch):
        newest = ".".join(map(str, NEWEST_TORCH))
        said.append(f"torch {torch.version} is newer than {newest}, the newest that lora-rocm was run with.")
    return said


def _require_inputs(loaded: LoadedRecipe, begun: bool) -> None:
    loaded.require_files(begun)  # the worker requires them if there are steps left to train
    require_preview_images(loaded)
    require_packages()
    require_trackers(loaded.recipe.output)


def _choose(loaded: LoadedRecipe, run_dir: Path | None, resume: str | None) -> Chosen:
    """As ``choose``, and say so if there is no run where the newest was asked for."""
    chosen = choose(loaded, run_dir, resume)
    if resume == LATEST and not holds_run(chosen.run_dir):
        where = f"in {run_dir}" if run_dir else f"of {loaded.name} in {loaded.recipe.output.dir}"
        _say(f"--resume latest: there is no run {where} to go on with, so a new one begins in {chosen.run_dir.path}")
    return chosen


def resume_command(recipe_path: str, overrides: Sequence[str], run: RunDir) -> str:
    """Return the exact command that resumes a run, quoted for the shell of this system."""
    words = ["lora-rocm", "train", recipe_path]
    for override in overrides:
        words += ["--set", override]
    words += ["--run-dir", str(run.path), "--resume", "latest"]
    return quoted(words)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
