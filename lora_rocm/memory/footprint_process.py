"""A process that lists a step's kernels and counts its memory, while this process imports packages and encodes samples.

Both take seconds of one core and a model on the meta device, which imports what training imports. Other processes
compile the kernels (``checks.kernel_processes``). Counting fills the footprint cache (``footprint.counted``), where
loading finds the result. Loading counts by itself if the process failed, or takes too long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lora_rocm.device.main_memory import free_main_bytes
from lora_rocm.errors import MachineError
from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.processes.jobs import (
    CHILDREN,
    CountJob,
    CountRequest,
    StepLaunches,
    argument_of,
    request_line,
    step_launches,
)
from lora_rocm.processes.process import heavy_command

MIN_CORES, MIN_FREE_BYTES = 2, 4 * 2**30
"""A machine with less of either counts in the training process, and compiles a step's kernels in it."""
POLL_S, LIMIT_S = 0.1, 30.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1"}
"""The process opens no GPU, and downloads no base in addition to the training process."""


class FootprintProcess:
    """Counts the step of a recipe, for the largest shape that the recipe allows, and lists its kernels.

    It starts before the dtype is known, because its imports take half of its time.
    """

    def __init__(self, recipe: Path) -> None:
        self._recipe = recipe
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: CountRequest | None = None
        self._launches: StepLaunches | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="launches")
        try:
            self._child = subprocess.Popen(
                # input: its input has the request
                heavy_command(CHILDREN["count"].module, argument_of(CountJob(recipe)), reads_input=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=python_environment({**os.environ, **ENVIRONMENT}),
            )
        except OSError as error:
            sys.stderr.write(f"no process to count the memory of a step: {error}\n")

    def ask(self, request: CountRequest) -> None:
        """Let the process list and count. Call it once."""
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self._child.stdin.write(request_line(request))
                self._child.stdin.flush()
                self._reader.start()
                self._asked = request  # now another thread may join the reader

    def asked_for(self, request: CountRequest) -> FootprintProcess:
        """Return this process. If it was asked for something else, end it and return a new one that is asked."""
        if self._asked in (None, request):
            return self
        self.close()
        other = FootprintProcess(self._recipe)
        other.ask(request)
        return other

    def launches(self) -> StepLaunches | None:
        """Wait for the step's launches. Return None if the process was not asked, has failed, or was ended."""
        if self._asked is not None:
            self._reader.join()
        return self._launches

    @property
    def is_busy(self) -> bool:
        """Whether the process was asked, and has not ended."""
        return self._asked is not None and self._child is not None and self._child.poll() is None

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until the process has counted, or has ended; at most ``LIMIT_S``. Do not wait if it was not asked.

        ``beat``: called while waiting.
        """
        ends_at = time.monotonic() + LIMIT_S
        while self._asked is not None and self._child is not None and time.monotonic() < ends_at:
            try:
                self._child.wait(POLL_S)
                return
            except subprocess.TimeoutExpired:
                beat()

    def close(self) -> None:
        """End the process."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        if self._asked is not None:
            self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(OSError):  # a line that the process did not read
                if pipe is not None:
                    pipe.close()

    def _read(self) -> None:
        """Read the answer at once: the process would wait for a pipe that nobody empties."""
        assert self._child is not None and self._child.stdout is not None
        with suppress(OSError, ValueError, MachineError):  # it has ended, and its answer is missing or torn
            self._launches = step_launches(self._child.stdout.readline())


def can_help() -> bool:
    """Whether this machine has cores and memory for the process."""
    return (os.cpu_count() or 1) >= MIN_CORES and free_main_bytes() >= MIN_FREE_BYTES


def footprint_process(recipe: Path, cache_dir: str, on_gpu: bool) -> FootprintProcess | None:
    """Start the process where it saves time: for a step on a GPU, with cores to spare, and nothing counted before."""
    is_new = not footprints_file(cache_dir).exists()
    return FootprintProcess(recipe) if on_gpu and is_new and can_help() else None


def footprints_file(cache_dir: str) -> Path:
    """Return the path of the footprint cache in the folder of a recipe's caches."""
    return Path(cache_dir) / "footprints.json"
