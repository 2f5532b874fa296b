"""``queue run`` in its own process, with fake workers: ``python -m tests.commands.queue_process FOLDER NAME=MODE``."""

from __future__ import annotations

import sys
from pathlib import Path

from lora_rocm.commands import start_run
from lora_rocm.commands.output import Output
from lora_rocm.commands.queue_run import queue_run
from lora_rocm.rundir.layout import RunDir


def worker_of(modes: dict[str, str], run_dir: RunDir, *options: object) -> list[str]:
    """The command of a fake worker; the run's name begins with a key of ``modes``."""
    mode = next((mode for name, mode in modes.items() if run_dir.path.name.startswith(name)), "done")
    return [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[2:])
    start_run.worker_process.worker_command = lambda run, *options: worker_of(given, run)  # type: ignore[assignment]
    sys.exit(queue_run(Path(sys.argv[1]), Output()).exit_code)
