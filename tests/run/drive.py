"""A parent in a process of its own: ``python -m tests.run.drive MODE RUN_DIR [KEY=VALUE ...]``, with what a user sees.

With settings of the recipe, even an empty one, the worker is supervised.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lora_rocm.run.failure import exit_code_of
from lora_rocm.run.layout import RunDir
from lora_rocm.run.lock import locked
from lora_rocm.run.process import run_worker
from lora_rocm.run.progress import make_progress

mode, run_dir, overrides = sys.argv[1], RunDir(Path(sys.argv[2])), sys.argv[3:]


def run() -> int:
    command = [sys.executable, "-m", "tests.run.fake_worker", mode, str(run_dir.path)]
    with locked(run_dir), make_progress() as progress:
        if overrides:
            from tests.run.supervised import supervisor

            return supervisor(run_dir, mode, overrides, progress.on_event, progress.say).run()
        return run_worker(run_dir, os.environ, progress.on_event, command, progress.say)


sys.exit(exit_code_of(run))
