"""``lora-rocm queue run``: train the recipes of a queue one after another.

After a kill or a restart of the machine, the next call continues: an interrupted run is resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.commands.output import Failure, Output
from lora_rocm.commands.run_request import RunRequest
from lora_rocm.commands.start_run import RunResult, prepare_run, render
from lora_rocm.commands.train import trained
from lora_rocm.errors import LoraRocmError, StoppedError, UserError
from lora_rocm.foundation.exit_codes import exit_code_of
from lora_rocm.foundation.files import remove
from lora_rocm.foundation.terminal_text import legible
from lora_rocm.foundation.units import count_text
from lora_rocm.processes.process import Asked, stop_signals
from lora_rocm.recipe.load import load_recipe  # recipe: the user's own queue has it
from lora_rocm.rundir.newest import is_run, new_run_path
from lora_rocm.supervisor.queue_dir import QueueDir, QueueItem, locked

FAILED = ("failed", "died", "unusable", "unreadable")
"""States of recipes that are tried after all others."""
STOP_POLL_S = 0.5


@dataclass(frozen=True)
class QueueOutcome:
    """The outcome of one recipe.

    Attributes:
        name: its name.
        run: its run directory, or null if none began.
        outcome: done, stopped or failed.
        error: the error with which it failed, or null.
    """

    name: str
    run: Path | None
    outcome: str
    error: Failure | None = None


@dataclass(frozen=True)
class QueueRunResult:
    """Result of `queue run`.

    Attributes:
        recipes: the recipes that were tried, in this order.
        left: number of recipes that remain in the queue.
        stopped: whether the user stopped it.
        exit_code: exit code of the command.
    """

    recipes: tuple[QueueOutcome, ...]
    left: int
    stopped: bool
    exit_code: int


Train = Callable[[RunRequest, Asked], RunResult]


@dataclass
class QueueRunner:
    """Trains the recipes of one queue.

    Attributes:
        queue: the queue.
        output: prints progress.
        request: function that returns the request for a recipe and its run directory.
        train: function that trains one run.
    """

    queue: QueueDir
    output: Output
    request: Callable[[Path, Path, bool], RunRequest]
    train: Train
    _tried: dict[str, QueueOutcome] = field(default_factory=dict)

    def run(self) -> QueueRunResult:
        """Train until no recipe is left that was not tried, or the user stops.

        Raises:
            UserError: "queue-is-run", another process runs this queue.
            StorageError: the queue cannot be written.
        """
        with self.queue.editing():
            pass  # creates the folders
        what = "Another process runs this queue already."
        with locked(self.queue.run_lock, 0.0, what, "queue-is-run"), stop_signals() as asked:
            remove(self.queue.stop)
            stopped = False
            while not stopped and (item := self._next()) is not None:
                outcome = self._attempt(item, asked)
                self._tried[item.name] = outcome
                stopped = self._is_stopped(asked)
        codes = [each.error.exit_code for each in self._tried.values() if each.error is not None]
        code = StoppedError.exit_code if stopped else next(iter(codes), 0)
        return QueueRunResult(tuple(self._tried.values()), len(self.queue.items()), stopped, code)

    def _is_stopped(self, asked: Asked) -> bool:
        return asked.level > 0 or self.queue.stop.exists()

    def _next(self) -> QueueItem | None:
        """Return the first recipe that was not tried yet. Those that failed before come last."""
        items = [item for item in self.queue.items() if item.name not in self._tried]
        failed = [item for item in items if self.queue.state_of(item)[0] in FAILED]
        return next((item for item in items if item not in failed), next(iter(failed), None))

    def _attempt(self, item: QueueItem, asked: Asked) -> QueueOutcome:
        """Train one recipe, and return its outcome. An error of any kind ends only this recipe."""
        self.output.notify(f"Queue: {legible(item.path.name)}")
        errors: list[LoraRocmError] = []
        results: list[RunResult] = []
        with locked(self.queue.lock_of(item.name), 0.0, "Another process trains this recipe.", "queue-item-running"):
            exit_code_of(lambda: results.append(self._trained(item, asked)), report=errors.append)
            run = self.queue.run_of(item.name)
            result = results[0] if results else None
            is_done = result is not None and result.outcome in ("done", "complete") and result.exit_code == 0
            if is_done and run is not None:
                with self.queue.editing():
                    self.queue.finish(item.name, run)
        # Report
        if result is not None:
            self.output.notify(render(result))
        if is_done:
            return QueueOutcome(item.name, run, "done")
        for error in errors:
            self.output.notify(f"Queue: {legible(item.path.name)} failed, and the next recipe follows.\n{error}")
        stopped = (result is not None and result.outcome == "stopped") or self._is_stopped(asked)
        return QueueOutcome(item.name, run, "stopped" if stopped else "failed", *map(Failure.of, errors[:1]))

    def _trained(self, item: QueueItem, asked: Asked) -> RunResult:
        with self.queue.editing():
            item = self.queue.current(item)
            if item.fault:
                fix = "Correct or remove this file."
                raise UserError("queue-item-unusable", item.fault, where=str(item.path), fix=fix)
            run = self.queue.run_of(item.name)
            begun = run is not None and is_run(run)
            if run is None:
                run = new_run_path(Path(load_recipe(item.path).recipe.output.dir), item.name)
                self.queue.begin(item.name, run)
        return self.train(self.request(item.path, run, begun), asked)


def queue_run(folder: Path, output: Output, *, gpus: int | None = None, supervised: bool = True) -> QueueRunResult:
    """Train the recipes of a queue one after another.

    Raises:
        UserError: another process runs this queue.
        StorageError: the queue cannot be written.
    """
    queue = QueueDir(folder.absolute())

    def request(recipe: Path, run: Path, begun: bool) -> RunRequest:
        resume = str(run) if begun else None
        where = None if begun else run
        return RunRequest(str(recipe), run_dir=where, resume=resume, gpus=gpus, supervised=supervised)

    def train(request: RunRequest, asked: Asked) -> RunResult:
        with _following(queue, asked):
            return trained(prepare_run(request, output.notify), output, asked)

    return QueueRunner(queue, output, request, train).run()


@contextmanager
def _following(queue: QueueDir, asked: Asked) -> Iterator[None]:
    """Within the context, the queue's file ``stop`` counts as one Ctrl-C."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(STOP_POLL_S):
            if queue.stop.exists():
                asked.count = max(asked.count, 1)

    thread = threading.Thread(target=poll, daemon=True, name="queue-stop")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def queue_text(result: QueueRunResult) -> str:
    """Return the outcomes as text."""
    lines = [f"{legible(each.name)}: {each.outcome}{f', {each.run}' if each.run else ''}" for each in result.recipes]
    if result.stopped:
        lines.append("Stopped. Continue with: lora-rocm queue run")
    lines.append(f"{count_text(result.left, 'recipe')} left in the queue." if result.left else "The queue is empty.")
    return "\n".join(lines)
