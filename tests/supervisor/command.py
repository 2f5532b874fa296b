"""The command line with a fake worker: ``python -m tests.supervisor.command MODE train RECIPE ...``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lora_rocm import cli
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import worker_process

mode = sys.argv.pop(1)
ROOT = Path(__file__).parents[2]


def worker_command(run_dir: RunDir, *options: Any) -> list[str]:
    return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]


worker_process.worker_command = worker_command
cli.main()
