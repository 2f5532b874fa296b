"""A process that lists a step's kernels and counts its memory, while this process imports packages and encodes samples.

Both take seconds of one core and a model on the meta device, which imports what training imports. Other processes
compile the kernels (``checks.kernel_processes``). Counting fills the footprint cache (``footprint.counted``), where
loading finds the result. Loading counts by itself if the process failed, or takes too long.

On a machine with enough cores a second process counts the passes that recompute blocks, half of the work. This process
sends its result on to the first one, which counts alone if the second one fails.
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
from lora_rocm.processes.cores import core_count
from lora_rocm.processes.jobs import CHILDREN, argument_of, name_of, recomputed_count, request_line, step_launches
from lora_rocm.processes.process import heavy_command
from lora_rocm.processes.start_jobs import (
    CountAlone,
    CountJob,
    CountRequest,
    RecomputedCount,
    RecomputedJob,
    StepLaunches,
)

MIN_CORES, MIN_FREE_BYTES = 2, 4 * 2**30
"""A machine with less of either counts in the training process, and compiles a step's kernels in it."""
TWO_CORES, TWO_FREE_BYTES = 6, 6 * 2**30
"""A machine with less of either counts in one process."""
POLL_S, LIMIT_S = 0.1, 30.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1"}
"""The process opens no GPU, and downloads no base in addition to the training process."""


class FootprintProcess:
    """Counts the step of a recipe, for the largest shape that the recipe allows, and lists its kernels.

    It starts before the dtype is known, because its imports take half of its time.

    ``counts``: whether the memory was not counted before. Otherwise only the kernels are listed, without a second
    process.
    """

    def __init__(self, recipe: Path, counts: bool = True) -> None:
        self._recipe = recipe
        self._asked: CountRequest | None = None
        self._launches: StepLaunches | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="launches")
        self._sender = threading.Thread(target=self._send_on, daemon=True, name="recomputed")
        self._other = _begun(RecomputedJob(recipe)) if counts and has_room_for_two() else None
        self._child = _begun(CountJob(recipe, is_shared=self._other is not None))

    def ask(self, request: CountRequest) -> None:
        """Let the process list and count. Call it once."""
        if self._child is None:
            return
        if self._other is not None:
            with suppress(OSError, ValueError):  # it has ended, and the sender notices it
                _send(self._other, request)
        with suppress(OSError, ValueError):  # it has ended
            _send(self._child, request)
            if self._other is not None:
                self._sender.start()  # its message follows the request
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
        children = [child for child in (self._child, self._other) if child is not None]
        for child in children:
            child.kill()
        for child in children:
            child.wait()
        for thread in (self._reader, self._sender):
            if thread.is_alive():
                thread.join()
        for child in children:
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):  # a line that the process did not read
                    if pipe is not None:
                        pipe.close()

    def _read(self) -> None:
        """Read the answer at once: the process would wait for a pipe that nobody empties."""
        assert self._child is not None and self._child.stdout is not None
        with suppress(OSError, ValueError, MachineError):  # it has ended, and its answer is missing or torn
            self._launches = step_launches(self._child.stdout.readline())

    def _send_on(self) -> None:
        """Send the count of the other process on. If it has none, let the first process count alone."""
        assert self._other is not None and self._other.stdout is not None
        found: RecomputedCount | CountAlone = CountAlone()
        with suppress(OSError, ValueError, MachineError):  # it has ended, and its answer is missing or torn
            found = recomputed_count(self._other.stdout.readline())
        if self._child is not None:
            with suppress(OSError, ValueError):  # it has ended
                _send(self._child, found)


def _begun(job: CountJob | RecomputedJob) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            # input: its input has the request
            heavy_command(CHILDREN[name_of(job)].module, argument_of(job), reads_input=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=python_environment({**os.environ, **ENVIRONMENT}),
        )
    except OSError as error:
        sys.stderr.write(f"no process to count the memory of a step: {error}\n")
        return None


def _send(child: subprocess.Popen[bytes], request: object) -> None:
    if child.stdin is not None:
        child.stdin.write(request_line(request))
        child.stdin.flush()


def has_room_for_two() -> bool:
    """Whether this machine has cores and memory for two processes."""
    return core_count() >= TWO_CORES and free_main_bytes() >= TWO_FREE_BYTES


def can_help() -> bool:
    """Whether this machine has cores and memory for the process."""
    return core_count() >= MIN_CORES and free_main_bytes() >= MIN_FREE_BYTES


def footprint_process(recipe: Path, cache_dir: str, on_gpu: bool) -> FootprintProcess | None:
    """Start the process where it saves time: for a step on a GPU, with cores to spare, and nothing counted before."""
    is_new = not footprints_file(cache_dir).exists()
    return FootprintProcess(recipe) if on_gpu and is_new and can_help() else None


def footprints_file(cache_dir: str) -> Path:
    """Return the path of the footprint cache in the folder of a recipe's caches."""
    return Path(cache_dir) / "footprints.json"
