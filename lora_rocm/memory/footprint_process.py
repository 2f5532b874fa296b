"""A process that counts a step's memory while this process imports packages and encodes samples.

Counting takes seconds of one core, and loading needs its result. The process writes it into the footprint cache
(``footprint.counted``), where loading finds it. Loading counts by itself if the process failed, or takes too long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from lora_rocm.foundation.safe_path import python_environment
from lora_rocm.processes.jobs import CHILDREN, CountJob, CountRequest, argument_of, request_line
from lora_rocm.processes.process import heavy_command

MIN_CORES, MIN_FREE_BYTES = 4, 4 * 2**30
"""A machine with less of either counts in the training process."""
POLL_S, LIMIT_S = 0.1, 30.0
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "HF_HUB_OFFLINE": "1"}
"""The process opens no GPU, and downloads no base in addition to the training process."""


class FootprintProcess:
    """Counts the step of a recipe, for the largest shape that the recipe allows.

    It starts before dtype and settings are known, because its imports take most of its time.
    """

    def __init__(self, recipe: Path) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._is_asked = False
        try:
            self._child = subprocess.Popen(
                # input: its input has the request
                heavy_command(CHILDREN["count"].module, argument_of(CountJob(recipe)), reads_input=True),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=python_environment({**os.environ, **ENVIRONMENT}),
            )
        except OSError as error:
            sys.stderr.write(f"no process to count the memory of a step: {error}\n")

    def ask(self, request: CountRequest) -> None:
        """Let the process count."""
        if self._child is not None and self._child.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self._child.stdin.write(request_line(request))
                self._child.stdin.flush()
                self._is_asked = True

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until the process has counted, or has ended; at most ``LIMIT_S``. Do not wait if it was not asked.

        ``beat``: called while waiting.
        """
        ends_at = time.monotonic() + LIMIT_S
        while self._is_asked and self._child is not None and time.monotonic() < ends_at:
            try:
                self._child.wait(POLL_S)
                return
            except subprocess.TimeoutExpired:
                beat()

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            with suppress(OSError):  # a line that the process did not read
                if self._child.stdin is not None:
                    self._child.stdin.close()


def footprint_process(recipe: Path, cache_dir: str, on_gpu: bool) -> FootprintProcess | None:
    """Start the process where it saves time: for a step on a GPU, with cores to spare, and nothing counted before."""
    is_new = not footprints_file(cache_dir).exists()
    can_help = (os.cpu_count() or 1) >= MIN_CORES and psutil.virtual_memory().available >= MIN_FREE_BYTES
    return FootprintProcess(recipe) if on_gpu and is_new and can_help else None


def footprints_file(cache_dir: str) -> Path:
    """Return the path of the footprint cache in the folder of a recipe's caches."""
    return Path(cache_dir) / "footprints.json"
