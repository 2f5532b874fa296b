"""Stands in for the training child: ``python fake_worker.py MODE RUN_DIR``. Real process, real files, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from lora_rocm.run.events import EventWriter
from lora_rocm.run.layout import RunDir
from tests.run.fake_run import start_fields, step_fields


def wait_for_stop(run_dir: RunDir) -> None:
    while not run_dir.stop.exists():
        time.sleep(0.02)


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
    match mode:
        case "done":
            writer.write("end", reason="done", updates=3, exit_code=0)
        case "until-stopped":
            leave_with_parent()
            wait_for_stop(run_dir)
            writer.write("end", reason="stopped", updates=3, exit_code=130)
            return 130
        case "deaf":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            (run_dir.path / "grandchild").write_text(str(child.pid), encoding="utf-8")
            time.sleep(60)
        case "error":
            writer.write("error", code="disk-full", what="The disk is full.", where="/x", fix="Free it.", exit_code=3)
            print("Traceback (most recent call last):\n  File ...\nOSError: no space", file=sys.stderr)
            return 3
        case "crash-after-end":
            writer.write("end", reason="done", updates=3, exit_code=0)
            os.kill(os.getpid(), signal.SIGABRT)
        case "killed" | "late-orphan":
            os.kill(os.getpid(), signal.SIGKILL)
        case "traceback":
            print("some words", file=sys.stderr, flush=True)
            raise ValueError("nobody caught me")
        case "flood":
            print("x" * 2_000_000, flush=True)
            for number in range(20_000):
                print("line", number, "\x1b[31m")
            return 5
    return 0


if __name__ == "__main__":
    sys.exit(main())
