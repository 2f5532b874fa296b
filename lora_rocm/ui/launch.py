"""Starts training in its own process, as a terminal does: it outlives the page and its server.

The process is ``lora-rocm train`` or ``lora-rocm resume``, with its own supervisor. Its output goes to a file in the
program's own folder, which the page shows if the process ends before the run has recorded why.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_rocm.errors import UserError, storage_error
from lora_rocm.foundation.bounded_read import FileVersion, check_plain
from lora_rocm.foundation.files import make_folder, open_in_place
from lora_rocm.foundation.safe_path import python_command, python_environment
from lora_rocm.hardware.app_dir import own_app_dir
from lora_rocm.processes.process import own_group
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir
from lora_rocm.rundir.newest import is_run
from lora_rocm.supervisor.queue_dir import QueueDir

MAX_SHOWN_BYTES = 1 << 14


@dataclass
class Launched:
    """A process that was started here.

    Attributes:
        run_dir: its run or its queue.
        output: the file with its output.
        began_s: when it was started, in seconds since the epoch.
        asked: the request with the version of its recipe; None if it continues something.
    """

    run_dir: Path
    output: Path
    process: subprocess.Popen[bytes]
    began_s: float = field(default_factory=time.time)
    asked: object = None

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.process.poll()

    @property
    def end_of_output(self) -> str:
        """The end of its output."""
        try:
            size = check_plain(self.output, 1 << 40)
            with self.output.open("rb") as file:
                file.seek(max(0, size - MAX_SHOWN_BYTES))
                return file.read(MAX_SHOWN_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return ""


class Launches:
    """The processes that one server has started, by run directory."""

    def __init__(self) -> None:
        self._lock, self._of = threading.Lock(), dict[Path, Launched]()
        self._training = threading.Lock()

    def train(self, recipe: Path | str, overrides: Sequence[str], working: Path) -> Path:
        """Start a run of a recipe, and return its directory.

        While the process of an equal start has not made its run yet, this is the same start: a double click.

        Args:
            recipe: path of the recipe, or name of a shipped one.
            overrides: ``section.key=value`` settings.
            working: the folder in which relative paths of the recipe start.

        Raises:
            LoraRocmError: the run is refused, before any file is written.
        """
        from lora_rocm.commands.run_request import RunRequest
        from lora_rocm.commands.start_run import prepare_run

        request = RunRequest(str(recipe), tuple(overrides))
        asked = (request, working, _version(working / recipe))
        with self._training:
            for each in self.all():
                if each.asked == asked and each.exit_code is None and not is_run(each.run_dir):
                    return each.run_dir
            run_dir = RunDir((working / prepare_run(request).run_dir.path).absolute())
            self._start(run_dir.path, request.start_words(run_dir), working, asked)
        return run_dir.path

    def resume(self, run_dir: RunDir, working: Path) -> None:
        """Continue a run with its own recipe.

        Raises:
            LoraRocmError: the run is refused.
        """
        from lora_rocm.commands.run_request import RunRequest
        from lora_rocm.commands.start_run import prepare_run

        if is_running(run_dir):
            fix = "Wait until it ends, or stop it."
            raise UserError("run-is-running", "This run is running already.", where=str(run_dir.path), fix=fix)
        request = RunRequest.continuing(run_dir.path)
        prepare_run(request)
        self._start(run_dir.path, request.start_words(run_dir), working)

    def queue(self, folder: Path, working: Path) -> None:
        """Run a queue. It is known by its folder, as a run is by its directory.

        Raises:
            UserError: "queue-is-run", a process runs it already.
        """
        if QueueDir(folder).is_run():
            fix = "Wait until it ends, or stop it."
            raise UserError("queue-is-run", "Another process runs this queue already.", where=str(folder), fix=fix)
        self._start(folder, ["queue", "run", "--queue-dir", str(folder)], working)

    def of(self, run_dir: Path) -> Launched | None:
        """Return the process that was started last for a run, or None."""
        return self._of.get(run_dir)

    def all(self) -> list[Launched]:
        """Return the newest process of each run."""
        with self._lock:
            return list(self._of.values())

    def _start(self, run_dir: Path, words: Sequence[str], working: Path, asked: object = None) -> None:
        name = hashlib.sha256(str(run_dir).encode("utf-8", "replace")).hexdigest()[:24]
        output = own_app_dir() / "ui" / "started" / f"{name}.log"
        with self._lock:
            before = self._of.get(run_dir)
            if before is not None and before.exit_code is None:
                fix = "Wait until it ends, or stop it."
                raise UserError("run-is-running", "This run is running already.", where=str(run_dir), fix=fix)
            try:
                make_folder(output.parent)
                with open_in_place(output, again=True) as log:
                    process = subprocess.Popen(
                        python_command("-m", "lora_rocm", *words),
                        cwd=working,
                        env=python_environment(os.environ),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        **own_group(),
                    )
            except OSError as error:
                raise storage_error(error, output) from error
            self._of[run_dir] = Launched(run_dir, output, process, asked=asked)


def _version(recipe: Path) -> FileVersion | None:
    """Return the version of a recipe; None for a shipped one."""
    with contextlib.suppress(OSError):
        return FileVersion.of(recipe)
    return None
