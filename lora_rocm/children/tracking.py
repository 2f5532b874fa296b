"""Child process that logs a run to a tracker such as wandb (``jobs.TrackJob``).

It reads the run's events and passes their numbers to the tracker. The run neither waits for it nor depends on it.
The process ends after its standard input closes.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from lora_rocm.errors import LoraRocmError, MachineError
from lora_rocm.families.registry import FAMILIES, FamilyRegistry
from lora_rocm.processes import optional_packages
from lora_rocm.processes.jobs import TrackJob, job_of
from lora_rocm.recipe.load import load_recipe  # recipe: only read, for the trackers
from lora_rocm.recipe.paths import settings_without_paths
from lora_rocm.rundir.event_types import ErrorEvent, StepEvent, TelemetryEvent, ValidationEvent, WatchedEvent
from lora_rocm.rundir.events import EventReader, emit
from lora_rocm.rundir.exit_status import size_of
from lora_rocm.rundir.layout import SUPERVISOR, RunDir
from lora_rocm.telemetry.numbers import numbers_of as telemetry_numbers
from lora_rocm.train.hooks import SCALARS

Tracked = StepEvent | ValidationEvent | WatchedEvent | TelemetryEvent
CALL_LIMIT_S = 60.0
POLL_S = 1.0


TAG = "lora_rocm.run"
"""Name of the tag that identifies a run in MLflow. Its value is the ``id`` that wandb gets for the same run."""


def options_of(name: str, run_dir: RunDir) -> dict[str, Any]:
    """Return arguments for a tracker's class, in addition to the project. They let a resumed run continue its log."""
    title = run_dir.path.name
    run_id = blake2b(str(run_dir.path).encode("utf-8", "replace"), digest_size=8).hexdigest()
    known: dict[str, dict[str, Any]] = {
        "wandb": {"name": title, "id": run_id, "resume": "allow", "dir": str(run_dir.path)},
        "trackio": {"name": title, "resume": "allow"},
        "mlflow": {"run_name": title, "tags": {TAG: run_id}},
    }
    return known.get(name, {})


def found_again(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the ``run_id`` of the MLflow run with the tag in ``options``; empty if there is none.

    The search is necessary because MLflow chooses ids itself.
    """
    mlflow: Any = import_module("mlflow")
    wanted = f"tags.`{TAG}` = '{options['tags'][TAG]}'"
    runs = mlflow.search_runs(search_all_experiments=True, filter_string=wanted, max_results=1, output_format="list")
    return {"run_id": str(runs[0].info.run_id)} if runs else {}


def track(
    job: TrackJob, over: Callable[[], bool], registry: FamilyRegistry = FAMILIES, limit_s: float = CALL_LIMIT_S
) -> None:
    """Log the numbers of all events in the run's file from byte ``job.offset`` on, until ``over()`` returns True.

    ``over`` may wait before it returns. If a call of the tracker takes longer than ``limit_s``, the process exits.
    """
    run_dir, name = RunDir(job.run_dir), job.tracker
    PartialState(cpu=True)  # the library asks it which process may log
    limited = _Limit(name, limit_s)
    optional_packages.show()  # a tracker or its plug-in may need one, such as boto3
    with limited.call():
        options = options_of(name, run_dir)
        earlier = found_again(options) if name == "mlflow" else {}
        tracker = LOGGER_TYPE_TO_CLASS[name](job.project, **options, **earlier)
        tracker.start()
        if not earlier:  # MLflow refuses a parameter that has another value now
            tracker.store_init_configuration(_settings(run_dir, registry))
    reader = EventReader(run_dir.events(), job.offset, (StepEvent, ValidationEvent, WatchedEvent))
    file = run_dir.events(SUPERVISOR)
    telemetry = EventReader(file, size_of(file), (TelemetryEvent,))
    ended, newest = False, 0
    while not ended:
        ended = over()
        for event in [*reader.poll(), *telemetry.poll()]:
            if not isinstance(event, Tracked):
                continue
            # wandb drops what comes with an earlier step
            newest = max(newest, event.updates) if isinstance(event, TelemetryEvent) else event.updates
            with limited.call():
                tracker.log(numbers_of(event), step=newest)
    with limited.call():
        tracker.finish()


def numbers_of(event: Tracked) -> Mapping[str, float]:
    """Return the finite numbers of an event, with names such as "step/loss" and "telemetry/gpu0/power_w"."""
    if isinstance(event, TelemetryEvent):
        return telemetry_numbers(event)
    found = {name: getattr(event, name) for name in SCALARS[event.type]}
    found |= (event.optimizer if isinstance(event, StepEvent) else {}) | event.measures
    return {f"{event.type}/{name}": value for name, value in found.items() if value is not None}


def _settings(run_dir: RunDir, registry: FamilyRegistry) -> dict[str, bool | int | float | str]:
    """Return the recipe's values, keyed by "section.key".

    Values that are not numbers, booleans or texts are converted to text.

    Paths are omitted, because a tracker may be a network service.
    """
    sections = settings_without_paths(load_recipe(run_dir.recipe, registry=registry).recipe)
    pairs = [
        (f"{name}.{key}", value)
        for name, section in sections.items()
        if isinstance(section, dict)
        for key, value in section.items()
    ]
    pairs = [(key, value) for key, value in pairs if value is not None]
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in pairs}


class _Limit:
    """Ends the process if a call takes too long. A library that hangs cannot be interrupted within the process."""

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s

    @contextmanager
    def call(self) -> Iterator[None]:
        timer = threading.Timer(self._limit_s, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        emit(ErrorEvent(**_failed(self._name, f"it did not answer for {self._limit_s:g} s").to_event()))
        os._exit(MachineError.exit_code)


def _failed(name: str, why: str) -> MachineError:
    what = f"Logging to {name} stopped: {why}. Training continues."
    return MachineError("tracker-failed", what, fix=f"Check your network and the settings of {name}.")


def main() -> int:
    """Log one run and return the exit code. Errors are emitted as events on standard output."""
    try:
        job = job_of(TrackJob)
    except LoraRocmError as error:
        emit(ErrorEvent(**error.to_event()))
        return error.exit_code
    closed = threading.Event()

    def listen() -> None:
        while os.read(sys.stdin.fileno(), 1):  # unbuffered: a buffer's lock would be held at exit
            pass
        closed.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        track(job, lambda: closed.wait(POLL_S))
        return 0
    except Exception as error:  # edge: a tracker may raise anything
        traceback.print_exc()
        emit(ErrorEvent(**_failed(job.tracker, f"{type(error).__name__}: {error}").to_event()))
        return MachineError.exit_code


if __name__ == "__main__":
    sys.exit(main())
