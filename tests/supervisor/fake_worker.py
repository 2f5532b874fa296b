"""A fake training child, without torch: ``python -m tests.supervisor.fake_worker MODE RUN_DIR``."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lora_rocm.rundir.heartbeat import HeartbeatWriter
from lora_rocm.rundir.layout import RunDir
from tests.supervisor.wire import LineWriter, start_fields, step_fields


def leave_with_parent() -> None:
    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(77)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """One start: three steps from the newest checkpoint on, then the mode's own end.

    ``first:MODE`` ends so at its first start only, ``2:MODE`` at the first two. ``further,2:MODE`` also writes a
    checkpoint each time. ``MODE@1``: of several ranks only that one ends so, the others wait for it. The file
    ``started`` records its arguments and variables, a line for each start.
    """
    run_dir, rank = RunDir(Path(sys.argv[2])), int(os.environ.get("RANK", "0"))
    before = starts_of(run_dir, rank)
    when, mode = mode_of(sys.argv[1], rank, before)
    with (run_dir.path / "started").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"options": sys.argv[3:], "environ": dict(os.environ)}) + "\n")
    if mode in BEFORE_A_WORD:
        BEFORE_A_WORD[mode]()
    writer = LineWriter(run_dir.events(rank), session=before + 1)
    if mode == "late-orphan":  # the orphan's last event before the real worker can start
        writer.write("end", reason="stopped", updates=0, exit_code=130)
    heartbeat = HeartbeatWriter(run_dir.heartbeat(rank))
    heartbeat.beat("start")
    if "--stacks-after" in sys.argv:
        after_s = min(json.loads(sys.argv[sys.argv.index("--stacks-after") + 1]).values())
        faulthandler.dump_traceback_later(after_s, repeat=True, file=run_dir.stacks(rank).open("wb"))
    reached = max((updates for updates, _ in run_dir.list_checkpoints()), default=0)
    writer.write("start", **start_fields(pid=os.getpid(), resumed_from=reached or None))
    writer.write("phase", phase="step", state="begin", seconds=0.0)
    for updates in range(reached + 1, reached + 4):
        heartbeat.beat("loader")
        heartbeat.beat("step")
        writer.write("step", **step_fields(updates))
    if "further" in when:
        save(run_dir, writer, reached + 3)
    if mode.startswith("loader-"):
        heartbeat.beat("loader")
    if mode == "wait":
        heartbeat.beat("verdict")
    return ENDINGS[mode](run_dir, writer)


def starts_of(run_dir: RunDir, rank: int) -> int:
    """The starts of a rank so far."""
    try:
        lines = run_dir.events(rank).read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    return sum(json.loads(line)["type"] == "start" for line in lines)


def mode_of(text: str, rank: int, before: int) -> tuple[str, str]:
    """(when, how this start ends) of a mode, for a rank that was started so often before."""
    when, _, mode = text.rpartition(":")
    mode, _, whose = mode.partition("@")
    if whose and rank != int(whose):
        mode = "wait"
    for word in when.replace("first", "1").split(","):
        if word.isdigit() and before >= int(word):
            mode = "done"
    return when, mode


def save(run_dir: RunDir, writer: LineWriter, updates: int) -> None:
    run_dir.checkpoint(updates).mkdir(parents=True)
    writer.write("checkpoint", updates=updates, path=f"checkpoints/step-{updates:08d}", lora="x")


def silence() -> None:
    while True:
        time.sleep(60)


def wordless() -> None:
    os._exit(7)


def done(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("end", reason="done", updates=3, exit_code=0)
    return 0


def until_stopped(run_dir: RunDir, writer: LineWriter) -> int:
    leave_with_parent()
    while not run_dir.stop.exists():
        time.sleep(0.02)
    writer.write("end", reason="stopped", updates=3, exit_code=130)
    return 130


def deaf(run_dir: RunDir, writer: LineWriter) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (run_dir.path / "grandchild").write_text(str(child.pid), encoding="utf-8")
    return child.wait()


def error(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("error", code="disk-full", what="The disk is full.", where="/x", fix="Free it.", exit_code=3)
    sys.stderr.write("Traceback (most recent call last):\n  File ...\nOSError: no space\n")
    return 3


def stop_while_caching(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("error", code="stopped", what="Stopped while encoding.", where="", fix="", exit_code=130)
    return 130


def crash_after_end(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("end", reason="done", updates=3, exit_code=0)
    os.abort()


def killed(run_dir: RunDir, writer: LineWriter) -> int:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # on Windows both end it at once
    return 0


def traceback(run_dir: RunDir, writer: LineWriter) -> int:
    sys.stderr.write("some words\n")
    raise ValueError("nobody caught me")


def flood(run_dir: RunDir, writer: LineWriter) -> int:
    sys.stdout.write("x" * 2_000_000 + "\n")
    sys.stdout.writelines(f"line {number} \x1b[31m\n" for number in range(20_000))
    return 5


def hang(run_dir: RunDir, writer: LineWriter) -> int:
    silence()
    return 0


def hang_writing(run_dir: RunDir, writer: LineWriter) -> int:
    while True:
        sys.stderr.write("still here, doing nothing\n" * 100)
        sys.stderr.flush()
        time.sleep(0.01)


def spin(run_dir: RunDir, writer: LineWriter) -> int:
    while True:
        pass


def blocks_in_c(run_dir: RunDir, writer: LineWriter) -> int:
    """A call into C that keeps the interpreter's lock: no other Python thread of the process runs again."""
    import ctypes  # only here: workers are started by the hundred

    library = ctypes.PyDLL("msvcrt" if sys.platform == "win32" else None)
    if sys.platform == "win32":
        library._sleep(60_000)
    else:
        library.sleep(60)
    return 0


def hang_deaf(run_dir: RunDir, writer: LineWriter) -> int:
    """Hears no signal, sees no stop file, and has started somebody who started somebody and left."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    child = "import os, subprocess, sys; sleep = [sys.executable, '-c', 'import time; time.sleep(60)']; "
    child += "print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL).pid, flush=True); os._exit(0)"
    said = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    (run_dir.path / "grandchild").write_bytes(said.stdout)
    silence()
    return 0


def hang_after_end(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("end", reason="done", updates=3, exit_code=0)
    silence()
    return 0


def change_then_die(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("change", id="micro-batch-halved", effect="rounding", seen="out-of-memory", text="smaller")
    os._exit(9)


def loader_then_die(run_dir: RunDir, writer: LineWriter) -> int:
    writer.write("change", id="workers-0", effect="exact", seen="loader-hang", text="without")
    os._exit(9)


def change_then_full(run_dir: RunDir, writer: LineWriter) -> int:
    """All settings that a worker can change were changed, and memory ran out all the same: it was fragmented."""
    writer.write("change", id="checkpointing", effect="rounding", seen="out-of-memory", text="again")
    return failing("out-of-memory")(run_dir, writer)


def failing(code: str) -> Callable[[RunDir, LineWriter], int]:
    def end(run_dir: RunDir, writer: LineWriter) -> int:
        writer.write("error", code=code, what=f"It met {code}.", where="there", fix="Do so.", exit_code=3)
        return 3

    return end


def reset(run_dir: RunDir, writer: LineWriter) -> int:
    """A GPU that faults, and is not there at the next start."""
    starts = starts_of(run_dir, 0)
    return failing("device-fault" if starts == 1 else "gpu-not-seen")(run_dir, writer)


BEFORE_A_WORD: dict[str, Callable[[], None]] = {"start-hang": silence, "start-die": wordless}
CODES = ("transfer-failed", "canary-kernel", "nonfinite", "out-of-memory", "device-fault", "gpu-not-seen", "internal")
ENDINGS: dict[str, Callable[[RunDir, LineWriter], int]] = {
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
    "hang": hang,
    "wait": hang,
    "rank-lost": failing("rank-lost"),
    "loader-hang": hang,
    "hang-writing": hang_writing,
    "spin": spin,
    "blocks-in-c": blocks_in_c,
    "hang-deaf": hang_deaf,
    "hang-after-end": hang_after_end,
    "change-then-die": change_then_die,
    "loader-then-die": loader_then_die,
    "change-then-full": change_then_full,
    "reset": reset,
    **{code: failing(code) for code in CODES},
}


if __name__ == "__main__":
    sys.exit(main())
