"""A parent in a separate process, with the output that a user sees.

``python -m tests.supervisor.drive MODE RUN_DIR [KEY=VALUE ...]``
With settings of the recipe, even an empty one, the worker is supervised.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lora_rocm.foundation.exit_codes import exit_code_of
from lora_rocm.report.progress_bar import make_progress
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.lock import locked
from lora_rocm.supervisor.worker_process import run_worker

mode, run_dir, overrides = sys.argv[1], RunDir(Path(sys.argv[2])), sys.argv[3:]


def run() -> int:
    command = [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]
    with locked(run_dir), make_progress() as progress:
        if overrides:
            from tests.supervisor.supervised import supervisor

            return supervisor(run_dir, mode, overrides, progress.on_event, progress.notify).run()
        return run_worker(run_dir, os.environ, progress.on_event, command, progress.notify)


sys.exit(exit_code_of(run))
