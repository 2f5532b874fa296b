"""A training run as seen by the parent process: check the recipe, train in a child process, write the report.

``prepare_run`` checks. ``PreparedRun.train`` trains in the calling thread, as ``lora-rocm train`` does. ``start_run``
does both in a new thread, for programs that follow several runs.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from lora_rocm import BEGAN_S
from lora_rocm.commands import sample_export
from lora_rocm.commands.named_inputs import require_inputs
from lora_rocm.commands.output import Notify, unheard
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.errors import LoraRocmError, MachineError, ResumeError, StoppedError, StorageError
from lora_rocm.foundation.files import write_json
from lora_rocm.foundation.names import name_key
from lora_rocm.foundation.packages import require_packages
from lora_rocm.foundation.terminal_text import printable, quoted
from lora_rocm.hardware.ranks import Rank, rank_of
from lora_rocm.hardware.wheels import NEWEST_TORCH, is_newer_than_run
from lora_rocm.processes.process import Asked, OnEvent
from lora_rocm.recipe.load import LoadedRecipe, load_recipe  # recipe: the user names it
from lora_rocm.recipe.schema import Recipe
from lora_rocm.report.report import write_report
from lora_rocm.report.vram_spill import spill_bytes
from lora_rocm.rules import mitigation_store
from lora_rocm.rules.attention_refusal import require_fitting_attention
from lora_rocm.rules.eight_bit_refusal import require_eight_bit
from lora_rocm.rules.environment import EnvPlan, environment_json, plan
from lora_rocm.rules.rule import Situation
from lora_rocm.rules.this_machine import situation_here
from lora_rocm.rundir.event_types import Event, NoticeEvent
from lora_rocm.rundir.events import read_events
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.rundir.made_from import stale_exports
from lora_rocm.rundir.recipe_file import withdraw
from lora_rocm.rundir.results import final_files, named_paths
from lora_rocm.supervisor import lock, multi_gpu, selftest_runner, supervisor, tuning_runner
from lora_rocm.supervisor import worker_process as worker_process
from lora_rocm.supervisor.choose_run_dir import LATEST, Chosen, choose, holds_run, settle
from lora_rocm.supervisor.restart_policy import attempt_of
from lora_rocm.supervisor.telemetry import Telemetry
from lora_rocm.supervisor.trackers import Trackers
from lora_rocm.telemetry.cards import cards_of

FOLLOW_POLL_S = 0.2
Outcome = Literal["done", "stopped", "complete", "ended", "prepared"]


@dataclass(frozen=True)
class RunResult:
    """Result of a run that ended without an error.

    Attributes:
        run_dir: the run directory.
        outcome: done; stopped by the user; complete, if nothing was left to train; ended; or prepared, if nothing was
            started (``fork --no-start``). It is ended if the worker had another exit code, or was one of several
            processes of ``torchrun``.
        exit_code: exit code of the command.
        files: LoRA files of a finished run.
        remarks: sentences about files of an earlier step.
        stopped_by: how the run was stopped, if the worker did not stop by itself.
        again: command that continues the run.
        talk: command to chat with its model; empty for an image model.
        report: the report, or null if none was written.
        report_fault: why the report could not be written; empty if it was.
    """

    run_dir: Path
    outcome: Outcome
    exit_code: int
    files: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()
    stopped_by: str = ""
    again: str = ""
    talk: str = ""
    report: Path | None = None
    report_fault: str = ""


def render(result: RunResult) -> str:
    """Return the result as text; empty if the worker has already shown everything."""
    lines = [result.stopped_by] if result.stopped_by else []
    if result.outcome == "prepared":
        lines.append(f"Run directory: {result.run_dir}\nStart it with:\n  {result.again}")
    if result.outcome == "stopped":
        lines.append(f"Stopped. Continue with:\n  {result.again}")
    if result.outcome in ("done", "complete"):
        start = "Done. The LoRA" if result.outcome == "done" else "This run is complete"
        lines.append(f"{start}: {', '.join(map(str, result.files or [result.run_dir]))}")
        lines += result.remarks
        lines += [f"Chat with it:\n  {result.talk}"] if result.talk else []
    if result.report is not None:
        lines.append(f"Report: {result.report}")
    if result.report_fault:
        later = quoted([str(result.run_dir)])
        lines.append(
            f"The report could not be written. To write it later: lora-rocm report {later}\n{result.report_fault}"
        )
    return "\n".join(lines)


def next_commands(result: RunResult, recipe: Recipe) -> str:
    """Return the commands that show what a finished LoRA for images has learned; empty if there is none."""
    if result.outcome not in ("done", "complete") or recipe.spec.trains_on_texts:
        return ""
    prompts = [prompt if isinstance(prompt, str) else prompt.prompt for prompt in recipe.sample.prompts]
    run = str(result.run_dir)
    commands = (["sample", run, "--prompt", *(prompts or ["a prompt"])[:1]], ["compare", run])
    return "\n".join(["See what it learned:", *(f"  {quoted(['lora-rocm', *words])}" for words in commands)])


def prepare_run(request: RunRequest, notify: Notify = unheard) -> PreparedRun:
    """Read the recipe and examine the machine. A run that cannot work is refused before any file is created.

    Args:
        request: the request for a run.
        notify: receives notices.

    Raises:
        LoraRocmError: the run is refused, with a message for the user.
    """
    loaded = load_recipe(request.recipe_path, request.overrides, request.registry)
    for notice in loaded.notices:
        notify(notice)
    chosen = choose(loaded, request.run_dir, request.resume)
    if request.resume == LATEST and not holds_run(chosen.run_dir):
        where = f"in {request.run_dir}" if request.run_dir else f"of {loaded.name} in {loaded.recipe.output.dir}"
        notify(f"--resume latest: there is no run {where} to continue, so a new one starts in {chosen.run_dir.path}")
    begun = chosen.resume and (chosen.run_dir.result.exists() or bool(chosen.run_dir.list_checkpoints()))
    require_inputs(loaded, begun)  # of a begun run, the worker requires images if there are steps left to train
    require_packages()
    me = rank_of(os.environ)
    here, everywhere = request.gpus or 1, request.gpus or 1
    if me.size > 1:
        multi_gpu.require_place(me, request.gpus, request.run_dir, request.resume)
        here, everywhere = me.local_size, me.size
    situation = multi_gpu.with_gpus(situation_here(loaded.recipe), here, everywhere)
    require_fitting_attention(situation)
    require_eight_bit(situation)
    return PreparedRun(request, loaded, chosen, situation, me)


@dataclass
class PreparedRun:
    """A run that is ready to be trained. Nothing has been written yet.

    Attributes:
        request: the request for the run.
        loaded: the loaded recipe.
        chosen: the run directory, and the checkpoint to continue from.
        situation: facts about the machine.
        me: rank of this process among those that ``torchrun`` has started.
    """

    request: RunRequest
    loaded: LoadedRecipe
    chosen: Chosen
    situation: Situation
    me: Rank

    @property
    def run_dir(self) -> RunDir:
        return self.chosen.run_dir

    @property
    def again(self) -> str:
        """The command that continues this run."""
        return self.request.resume_command(self.run_dir)

    @property
    def supervised(self) -> bool:
        return self.request.supervised and self.me.size == 1

    @property
    def children(self) -> int:
        """Number of workers."""
        return self.request.gpus or 1

    @property
    def spill_bytes(self) -> int | None:
        """Bytes that tensors may take before the GPU's driver spills; None if unknown or if it never does."""
        return spill_bytes(self.situation.facts, self.situation.selection, self.loaded.recipe.runtime.device)

    def train(self, on_event: OnEvent, notify: Notify, asked: Asked | None = None) -> RunResult:
        """Train in this thread until the run ends.

        Args:
            on_event: receives each event of the worker and of the supervisor.
            notify: receives notices for the user.
            asked: the caller's requests to stop, or None to stop at Ctrl-C, SIGTERM or the end of the terminal.

        Raises:
            LoraRocmError: training failed, with a message for the user.
        """
        loaded, accept_changes = self.loaded, self.request.accept_changes
        if not self.me.is_first:
            how = (self.me, loaded, self.chosen, self.situation, notify)
            code = multi_gpu.train_rank(*how, accept_changes=accept_changes, worker=self.request.worker)
            return RunResult(self.run_dir.path, "ended", code)
        if not holds_run(self.run_dir):  # refuses an unusable GPU before any file is created
            self.situation = selftest_runner.ensure(self.situation, loaded.recipe, notify)
            require_eight_bit(self.situation, tested=True)
        run = self.run_dir.create()
        with lock.locked(run):
            lock.end_leftover(run, notify, worker=self.request.worker)
            unfinished = settle(self.chosen, loaded, accept_changes)
            asked_name = loaded.recipe.output.name
            if name_key(asked_name) != run.name:
                where = loaded.layers.where(("output", "name"))
                title = f"The title in them is {printable(asked_name)}."
                notify(f"{where}: the files of this run keep their name, {run.lora.name}. {title}")
            if unfinished:
                return self._train_in(run, on_event, notify, asked)
            # a complete run: write missing result files again
            made_again = sample_export.make_again(run, loaded.recipe, notify)
            is_new = made_again or not run.report.exists()  # or the parent was killed before it wrote the report
            return self._result(run, "complete", 0, with_report=is_new)

    def _train_in(self, run: RunDir, on_event: OnEvent, notify: Notify, asked: Asked | None) -> RunResult:
        """Run the worker and write the report. The run directory is already prepared and locked."""
        recipe, accept_changes = self.loaded.recipe, self.request.accept_changes
        situation = selftest_runner.ensure(self.situation, recipe, notify)
        require_eight_bit(situation, tested=True)
        situation = supervisor.in_force(run, tuning_runner.ensure(run, situation, accept_changes, notify), notify)
        env_plan = plan(situation)
        write_json(run.environment, environment_json(env_plan, situation.facts), run.path)
        for sentence in machine_notices(situation, env_plan):
            notify(sentence)
        notify(f"Run directory: {run.path}")
        # run the worker, supervised or not
        stopped: StoppedError | None = None
        command = _commands(run, accept_changes, self.request.worker)
        with Trackers(run, recipe.output, notify) as trackers:
            on_event = trackers.passing(on_event)
            try:
                if self.supervised:
                    code = supervisor.Supervisor(
                        run,
                        recipe,
                        situation,
                        command,
                        on_event,
                        notify,
                        checkpoint=self.chosen.checkpoint,
                        again=self.again,
                        keep=partial(mitigation_store.keep, notify=notify),
                        size=self.children,
                        telemetry=_telemetry(situation, recipe, self.children),
                        asked=asked,
                    ).run()
                else:
                    attempt = attempt_of(read_events(run.events(SUPERVISOR)))
                    env, line = env_plan.applied_to(os.environ), command(self.chosen.checkpoint, attempt)
                    code = multi_gpu.run_unwatched(run, env, on_event, line, notify, self.children, asked)
            except StoppedError as error:
                code, stopped = error.exit_code, error
            except LoraRocmError as error:
                with contextlib.suppress(ResumeError, StorageError):  # the user has to see the original error
                    write_report(run, self.loaded.registry)
                if isinstance(error, MachineError) and self.again not in error.fix:
                    notify(f"The results so far are kept. When the cause is fixed, continue with:\n  {self.again}")
                raise
            finally:
                withdraw(run)
        # write the report
        outcome: Outcome = "stopped" if code == StoppedError.exit_code else "ended" if code else "done"
        return self._result(run, outcome, code, stopped_by="" if stopped is None else stopped.what)

    def _result(
        self, run: RunDir, outcome: Outcome, code: int, *, stopped_by: str = "", with_report: bool = True
    ) -> RunResult:
        """Write the report and return the run's result. If the report fails, the exit code stays the same."""
        files, remarks = results_of(run)
        report, fault = None, ""
        if with_report:
            try:
                report = write_report(run, self.loaded.registry)
            except (ResumeError, StorageError) as error:
                fault = str(error)
        talks = self.loaded.recipe.spec.trains_on_texts and outcome in ("done", "complete")
        return RunResult(
            run.path,
            outcome,
            code,
            tuple(files),
            tuple(remarks),
            stopped_by,
            self.again,
            quoted(["lora-rocm", "chat", str(run.path)]) if talks else "",
            report,
            fault,
        )


def results_of(run: RunDir) -> tuple[list[Path], list[str]]:
    """Return the finished files of a run, and a sentence about each file that is from an earlier step."""
    stale = stale_exports(run).values()
    old = {each.path for each in stale}
    return named_paths(path for path in final_files(run) if path not in old), [each.sentence for each in stale]


class RunHandle:
    """A run that trains in a thread of this process.

    If this process ends, the worker notices it, saves and exits.

    Attributes:
        run_dir: the run directory.
    """

    def __init__(self, run: PreparedRun) -> None:
        self.run_dir = run.run_dir
        self._asked = Asked()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self._thread.start()

    def _work(self, run: PreparedRun) -> None:
        try:
            self._result = run.train(
                self._events.put, lambda text: self._events.put(NoticeEvent(text=text)), self._asked
            )
        except BaseException as error:  # edge: result() raises it in the calling thread
            self._error = error
        finally:
            self._events.put(None)

    def follow(self) -> Iterator[Event]:
        """Yield the events of worker and supervisor and the parent's notices as they occur, until the run ends.

        Each event goes to only one reader. Leaving the loop does not stop the run.
        """
        while True:
            try:  # with a timeout, so that Ctrl-C reaches the caller on every system
                event = self._events.get(timeout=FOLLOW_POLL_S)
            except queue.Empty:
                continue
            if event is None:
                self._events.put(None)  # a later call ends, too
                return
            yield event

    def stop(self, *, at_once: bool = False) -> None:
        """Ask the worker to finish its step, save and exit.

        With ``at_once``, or on the second call, the worker is killed.
        """
        self._asked.count = max(self._asked.count + 1, 2 if at_once else 1)

    def result(self) -> RunResult:
        """Wait for the end of the run and return its result.

        Raises:
            LoraRocmError: the error with which the run ended.
        """
        while self._thread.is_alive():
            self._thread.join(timeout=FOLLOW_POLL_S)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def start_run(request: RunRequest) -> RunHandle:
    """Prepare a run, start training it in a new thread, and return its handle.

    Raises:
        LoraRocmError: ``prepare_run`` refuses the run. ``RunHandle.result`` raises later errors.
    """
    return RunHandle(prepare_run(request))


def _telemetry(situation: Situation, recipe: Recipe, count: int) -> Telemetry:
    """Return the telemetry of the GPUs used by ``count`` workers; empty if the recipe switches it off."""
    if not recipe.runtime.telemetry:
        return Telemetry()
    device = recipe.runtime.device
    return Telemetry(cards_of(situation.facts, situation.selection, situation.environ, device, count))


def _commands(run: RunDir, accept_changes: bool, worker: str | None) -> Callable[..., list[str]]:
    """Return a function that builds the command line for each start of the worker (``supervisor.Command``)."""
    beginnings = [BEGAN_S]  # time of the first start; a restart begins at its own call

    def command(
        checkpoint: Path | None, attempt: int = 0, stacks_after_s: Mapping[str, float] | None = None
    ) -> list[str]:
        began_s = beginnings.pop() if beginnings else time.time()
        return worker_process.worker_command(run, checkpoint, accept_changes, attempt, stacks_after_s, worker, began_s)

    return command


def machine_notices(situation: Situation, env_plan: EnvPlan) -> list[str]:
    """Return the notices about the machine that are important at the start of a run; ``doctor`` reports the others."""
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
    if gpus and torch is not None and not on_cpu:
        made_for = "AMD GPUs" if torch.hip else "NVIDIA GPUs" if torch.cuda else "the CPU"
        vendor = "amd" if torch.hip else "nvidia" if torch.cuda else None
        if all(gpu.vendor != vendor for gpu in gpus):
            said.append(
                f"Warning: this PyTorch ({torch.version}) is made for {made_for} and cannot use the {gpus[0].name}. "
                "Training on the CPU. (lora-rocm doctor shows how to install the matching build)"
            )
    if torch is not None and is_newer_than_run(torch):
        newest = ".".join(map(str, NEWEST_TORCH))
        said.append(f"torch {torch.version} is newer than {newest}, the newest version that lora-rocm was run with.")
    return said
