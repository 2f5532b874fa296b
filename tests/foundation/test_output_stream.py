"""A run with a terminal, reader or log that goes away: nothing is lost, and nothing else changes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from lora_rocm.foundation.output_stream import outlive, outliving_stdout
from lora_rocm.processes.process import kill_tree
from lora_rocm.rundir.layout import RunDir
from tests.event_lines import read_events
from tests.supervisor.fake_run import RECIPE

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
FULL = Path("/dev/full")
posix = pytest.mark.skipif(os.name == "nt", reason="pipes, signals and terminals of POSIX")
full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


class Refusing(io.RawIOBase):
    """A file that takes a few bytes at first, then nothing."""

    def __init__(self, room: int, error: int | None) -> None:
        self.room, self.error, self.taken = room, error, b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int | None:
        part = bytes(data)[: self.room]
        if not part and self.error is None:
            return None
        if not part:
            raise OSError(self.error, "refused")
        self.room -= len(part)
        self.taken += part
        return len(part)


@pytest.mark.parametrize("error", [28, 32, 5, None], ids=["full", "no reader", "no terminal", "does not wait"])
def test_what_is_not_taken_is_dropped(error: int | None) -> None:
    file = Refusing(5, error)
    stream = outlive(io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8"))
    for _ in range(2000):
        stream.write("größe\n")
        stream.flush()
    file.room = 100
    stream.write("there is room again\n")
    assert file.taken == "größ".encode()[:5] + b"there is room again\n"


def test_without_it_such_a_stream_raises() -> None:
    """Negative control."""
    file = Refusing(5, 28)
    stream = io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8")
    with pytest.raises(OSError):
        stream.write("größe\n")
        stream.flush()
    file.room = 100  # for its buffered text


def test_a_stream_in_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    assert outlive(stream) is stream
    monkeypatch.setattr(sys, "stdout", stream)
    with outliving_stdout():
        print("words")  # noqa: T201
    assert sys.stdout is stream and stream.getvalue() == "words\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def start(place: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start ``lora-rocm train`` with a worker of that mode; processes still running at the test's end are ended."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(mode: str, *, before: list[str] | None = None, **streams: Any) -> subprocess.Popen[bytes]:
        command = [*(before or []), sys.executable, "-m", "tests.supervisor.command", mode, "train", "r.yaml"]
        command += ["--run-dir", "run", "--set", "runtime.self_test=no"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        environ.pop("PYTHONUNBUFFERED", None)
        running.append(subprocess.Popen(command, cwd=place, env=environ, **streams))
        return running[-1]

    yield begin
    for process in running:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def gone() -> IO[bytes]:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "wb")


def is_done(place: Path) -> bool:
    ends = read_events(RunDir(place / "run").events(), "end")
    return bool(ends) and ends[-1]["reason"] == "done" and (place / "run" / "report.html").exists()


def wait_for_step(place: Path, number: int = 3) -> None:
    events, deadline = place / "run" / "events.jsonl", time.monotonic() + WAIT_S
    while not events.exists() or events.read_bytes().count(b'"type": "step"') < number:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)  # the parent reads at least once more


@posix
def test_a_reader_that_goes_away_changes_nothing(start: Callable[..., Any], place: Path) -> None:
    with gone() as pipe:
        process = start("done", stdout=pipe, stderr=subprocess.PIPE)
        assert process.communicate(timeout=WAIT_S)[1] == b""
    assert process.returncode == 0 and is_done(place)


@full
def test_a_full_disk_below_the_log_changes_nothing(start: Callable[..., Any], place: Path) -> None:
    with FULL.open("wb") as log:
        process = start("done", stdout=log, stderr=log)
        assert process.wait(WAIT_S) == 0 and is_done(place)


@full
@pytest.mark.parametrize("streams", [pytest.param("stderr", marks=pytest.mark.slow), "both"])
def test_an_exit_code_is_not_lost_with_the_words(start: Callable[..., Any], place: Path, streams: str) -> None:
    (place / "r.yaml").write_text("nonsense: 1\n", encoding="utf-8")
    with FULL.open("wb") as log:
        process = start("done", stderr=log, stdout=log if streams == "both" else subprocess.DEVNULL)
        assert process.wait(WAIT_S) == 2


@full
def test_a_command_whose_output_is_the_result_says_that_it_was_not_written(place: Path) -> None:
    """``lora-rocm schema`` makes nothing else: the opposite of continuing."""
    with FULL.open("wb") as log:
        command = [sys.executable, "-P", "-m", "lora_rocm", "schema"]
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, cwd=place, timeout=WAIT_S)
    assert done.returncode == 3 and b"The disk is full" in done.stderr


COMMANDS = (
    ("--help", 3), ("--version", 3), ("train --help", 3), ("recipes", 3), ("recipes --json", 3),
    ("", 2), ("train --bad", 2), ("train --bad --json", 2), ("nope --json", 2), ("train gone.yaml --json", 2),
)  # fmt: skip
"""Words of commands that end at once, with their exit codes while standard output cannot be written."""


@full
@pytest.mark.parametrize(("words", "code"), COMMANDS)
def test_a_full_disk_below_any_output_ends_without_a_traceback(words: str, code: int, place: Path) -> None:
    """Python's own complaints at its end count too. A full standard error changes no exit code."""
    command = [sys.executable, "-P", "-m", "lora_rocm", *words.split()]
    with FULL.open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, cwd=place, timeout=WAIT_S)
        both = subprocess.run(command, stdout=log, stderr=log, cwd=place, timeout=WAIT_S)
    assert (done.returncode, both.returncode) == (code, code)
    assert done.stderr and not any(word in done.stderr for word in (b"Traceback", b"ignored", b"bug"))
    if words in ("--help", "nope --json"):  # the control
        usual = subprocess.run(command, capture_output=True, cwd=place, timeout=WAIT_S)
        assert usual.stdout and usual.returncode == (0 if words == "--help" else 2)


@posix
def test_a_terminal_that_is_closed_stops_and_saves(place: Path) -> None:
    """The kernel sends SIGHUP to the session, and every write to the terminal fails from then on."""
    import pty

    pid, terminal = pty.fork()
    if pid == 0:  # the child, with the terminal as its own
        os.chdir(place)
        os.environ.update(PYTHONPATH=str(ROOT), TERM="xterm", COLUMNS="100")
        words = ["-m", "tests.supervisor.command", "until-stopped", "train", "r.yaml", "--run-dir", "run"]
        os.execv(sys.executable, [sys.executable, *words])
    try:
        wait_for_step(place)
        assert b"Run directory" in os.read(terminal, 65536)
        os.close(terminal)
        deadline, ended = time.monotonic() + WAIT_S, (0, 0)
        while ended[0] == 0 and time.monotonic() < deadline:
            ended = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
    finally:
        if psutil.pid_exists(pid):
            kill_tree(pid)
    assert os.waitstatus_to_exitcode(ended[1]) == 130
    assert read_events(RunDir(place / "run").events(), "end")[-1]["reason"] == "stopped"
    assert (place / "run" / "report.html").exists()


@posix
def test_a_system_that_says_it_twice_still_waits_for_the_save(start: Callable[..., Any], place: Path) -> None:
    """At a logout or a shutdown: one signal again and again, or one after the other."""
    process = start("until-stopped", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for_step(place)
    for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        process.send_signal(signum)
        time.sleep(0.01)
    output = process.communicate(timeout=WAIT_S)[0]
    assert process.returncode == 130, output
    assert b"Finishing the step and saving" in output and b"Ending the training process now" not in output
    assert read_events(RunDir(place / "run").events(), "end")[-1]["reason"] == "stopped"


@posix
def test_nohup_is_respected(start: Callable[..., Any], place: Path) -> None:
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"]
    process = start("until-stopped", before=ignoring, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for_step(place)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert process.poll() is None and not (place / "run" / "stop").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
