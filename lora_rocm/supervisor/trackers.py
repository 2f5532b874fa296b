"""Processes that pass a run's numbers to experiment trackers (``output.log_with``). The run never waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import TracebackType

from lora_rocm.errors import UserError
from lora_rocm.foundation.files import open_in_place
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.hardware.ranks import LOCAL_RANK, NEEDED
from lora_rocm.processes.jobs import CHILDREN, TrackJob, argument_of
from lora_rocm.processes.process import OnEvent, heavy_command, own_group
from lora_rocm.recipe.output_section import OutputSection
from lora_rocm.rundir.event_types import ErrorEvent, Event
from lora_rocm.rundir.events import EventReader
from lora_rocm.rundir.exit_status import size_of
from lora_rocm.rundir.layout import RunDir

NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def missing_trackers(output: OutputSection) -> list[UserError]:
    """Return an error "tracker-missing" for each package of ``output.log_with`` that is not installed."""
    errors = list[UserError]()
    for name in output.log_with:
        if find_spec(name) is None:
            what, where = f"The package {name} is not installed.", f"output.log_with: {name}"
            fix = f"Install it with {sys.executable} -m pip install {name}, or remove it from output.log_with."
            errors.append(UserError("tracker-missing", what, where=where, fix=fix))
    return errors


class Trackers:
    """Runs one process per tracker within its context. When the context ends, the processes finish by themselves.

    Args:
        run_dir: the run. Its existing events are skipped, because an earlier start logged them.
        output: recipe section with the trackers and the project's name.
        notify: function that receives one message per failed tracker. The other trackers and the run continue.
        environ: environment of this process. The trackers get it without access to GPUs and without distributed ranks.
    """

    def __init__(
        self,
        run_dir: RunDir,
        output: OutputSection,
        notify: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._run_dir, self._output, self._notify = run_dir, output, notify
        kept = {name: value for name, value in environ.items() if name not in (*NEEDED, LOCAL_RANK)}
        self._environ = python_environment({**kept, **NO_GPU})
        self._running: dict[str, tuple[subprocess.Popen[bytes], EventReader]] = {}

    def __enter__(self) -> Trackers:
        offset = size_of(self._run_dir.events())
        for name in self._output.log_with:
            log = self._run_dir.tracker_log(name)
            reader = EventReader(log, size_of(log), (ErrorEvent,))
            job = TrackJob(run_dir=self._run_dir.path, tracker=name, project=self._output.log_project, offset=offset)
            # input: it sends the waiting values before it ends
            command = heavy_command(CHILDREN["track"].module, argument_of(job), reads_input=True)
            with open_in_place(log) as file:
                child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=self._environ, **own_group()
                )
            self._running[name] = child, reader
        return self

    def passing(self, on_event: OnEvent) -> OnEvent:
        """Return a function that calls ``on_event`` and then checks the trackers."""

        def checked(event: Event) -> None:
            on_event(event)
            self.check_trackers()

        return checked

    def check_trackers(self) -> None:
        """Report each tracker that failed or ended, once."""
        for name, (child, reader) in list(self._running.items()):
            code, errors = child.poll(), reader.poll()
            said = [f"{error.what} {error.fix}" for error in errors if isinstance(error, ErrorEvent)]
            if said or code is not None:
                _close(self._running.pop(name)[0])
                ended = (
                    f"{name} ended with exit code {code}, so this run is no longer logged to it. Training continues."
                )
                self._notify(said[-1] if said else ended)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.check_trackers()
        for child, _ in self._running.values():
            _close(child)


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
