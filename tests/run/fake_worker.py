"""Stands in for the training child: ``python -m tests.run.fake_worker MODE RUN_DIR``. A real process without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from lora_rocm.run.events import EventWriter
from lora_rocm.run.layout import RunDir
from tests.run.fake_run import start_fields, step_fields


def leave_with_parent() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(77)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    mode, run_dir = sys.argv[1], RunDir(Path(sys.argv[2]))
    writer = EventWriter(run_dir.events(), session=1)
    if mode == "late-orphan":  # what an orphan still says before the real worker can start
        writer.write("end", reason="stopped", updates=0, exit_code=130)
    writer.write("start", **start_fields(pid=os.getpid()))
    for updates in (1, 2, 3):
        writer.write("step", **step_fields(updates))
    return ENDINGS[mode](run_dir, writer)


def done(run_dir: RunDir, writer: EventWriter) -> int:
    writer.write("end", reason="done", updates=3, exit_code=0)
    return 0


def until_stopped(run_dir: RunDir, writer: EventWriter) -> int:
    leave_with_parent()
    while not run_dir.stop.exists():
        time.sleep(0.02)
    writer.write("end", reason="stopped", updates=3, exit_code=130)
    return 130


def deaf(run_dir: RunDir, writer: EventWriter) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (run_dir.path / "grandchild").write_text(str(child.pid), encoding="utf-8")
    return child.wait()


def error(run_dir: RunDir, writer: EventWriter) -> int:
    writer.write("error", code="disk-full", what="The disk is full.", where="/x", fix="Free it.", exit_code=3)
    sys.stderr.write("Traceback (most recent call last):\n  File ...\nOSError: no space\n")
    return 3


def stop_while_caching(run_dir: RunDir, writer: EventWriter) -> int:
    writer.write("error", code="stopped", what="Stopped while encoding.", where="", fix="", exit_code=130)
    return 130


def crash_after_end(run_dir: RunDir, writer: EventWriter) -> int:
    writer.write("end", reason="done", updates=3, exit_code=0)
    os.abort()


def killed(run_dir: RunDir, writer: EventWriter) -> int:
    psutil.Process().kill()
    return 0


def traceback(run_dir: RunDir, writer: EventWriter) -> int:
    sys.stderr.write("some words\n")
    raise ValueError("nobody caught me")


def flood(run_dir: RunDir, writer: EventWriter) -> int:
    sys.stdout.write("x" * 2_000_000 + "\n")
    sys.stdout.writelines(f"line {number} \x1b[31m\n" for number in range(20_000))
    return 5


ENDINGS: dict[str, Callable[[RunDir, EventWriter], int]] = {
    "done": done,
    "until-stopped": until_stopped,
    "deaf": deaf,
    "error": error,
    "stop-while-caching": stop_while_caching,
    "crash-after-end": crash_after_end,
    "killed": killed,
    "late-orphan": killed,
    "traceback": traceback,
    "flood": flood,
}


if __name__ == "__main__":
    sys.exit(main())
