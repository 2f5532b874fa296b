"""Real child processes that behave and misbehave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_rocm.errors import (
    MachineError,
    StoppedError,
    StorageError,
    WorkerDiedError,
    resume_advice,
    storage_error,
)
from lora_rocm.processes.process import error_from_event, kill_tree, own_group
from lora_rocm.rundir.event_types import ErrorEvent, Event, StartEvent, StepEvent
from lora_rocm.rundir.exit_status import describe_exit, worker_died_error
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor.worker_process import Worker, run_worker, with_fitting_fix, worker_command
from tests.supervisor.fake_run import save_recipe
from tests.wording import Worded, saying, says, worded

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0  # for events that come at once on an idle machine
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals between processes")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = RunDir(tmp_path / "a run ✓").create()
    save_recipe(made)
    return made


def run(run_dir: RunDir, mode: str) -> tuple[int, list[dict[str, Any]], list[str]]:
    events: list[dict[str, Any]] = []
    said: list[str] = []
    command = [sys.executable, "-m", "tests.supervisor.fake_worker", mode, str(run_dir.path)]
    code = run_worker(run_dir, os.environ, lambda event: events.append(event.to_json()), command, said.append)
    return code, events, said


def test_events_reach_the_parent_and_stale_things_are_ignored(run_dir: RunDir) -> None:
    run_dir.stop.touch()
    run(run_dir, "done")
    code, events, said = run(run_dir, "done")
    assert code == 0 and said == []
    assert [event["type"] for event in events] == [
        "start",
        "phase",
        "step",
        "step",
        "step",
        "end",
    ]  # not the first run's
    assert not run_dir.stop.exists()


def test_an_error_event_is_raised_with_its_exit_code(run_dir: RunDir) -> None:
    with pytest.raises(MachineError) as caught:
        run(run_dir, "error")
    assert (caught.value.code, caught.value.exit_code) == ("disk-full", 3)
    assert "Traceback" not in str(caught.value) and "Traceback" in run_dir.worker_log.read_text(encoding="utf-8")


def test_a_crash_after_the_end_takes_nothing_back(run_dir: RunDir) -> None:
    assert run(run_dir, "crash-after-end")[0] == 0


@posix
@pytest.mark.parametrize("mode", ["killed", "late-orphan"])
def test_a_killed_worker_is_explained(run_dir: RunDir, mode: str) -> None:
    with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
        run(run_dir, mode)
    assert caught.value.exit_code == 3 and "memory" in str(caught.value) and "--resume" not in str(caught.value)


def test_a_disk_too_full_for_a_last_word_is_named(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes, root: Path) -> None:
        raise storage_error(OSError(errno.ENOSPC, "full"), path)

    monkeypatch.setattr("lora_rocm.rundir.layout.write_atomic", full)
    with pytest.raises(StorageError) as caught:
        run(run_dir, "traceback")
    assert caught.value.code == "disk-full" and str(run_dir.path) in caught.value.where


def test_the_traceback_stays_in_the_log(run_dir: RunDir) -> None:
    run_dir.worker_log.write_text("an older session\n", encoding="utf-8")
    with pytest.raises(WorkerDiedError) as caught:
        run(run_dir, "traceback")
    text = str(caught.value)
    assert says(text, "supervisor/exit-code-1") and "some words" in text and "ValueError: nobody caught me" in text
    assert "Traceback" not in text and "older" not in text and str(run_dir.worker_log) in text


def test_a_log_that_is_a_link_is_not_written(run_dir: RunDir, tmp_path: Path) -> None:
    """Nor is the file that asks to stop."""
    for name in (run_dir.worker_log, run_dir.stop):
        name.symlink_to(tmp_path / f"elsewhere {name.name}")
    with pytest.raises(StorageError, check=saying("supervisor/a-link-lies")) as caught:
        Worker(run_dir, {}, ["never started"])
    assert str(run_dir.worker_log) in caught.value.where
    with pytest.raises(StorageError, check=saying("supervisor/a-link-lies")):
        run_dir.ask_to_stop()
    assert not list(tmp_path.glob("elsewhere*"))


def test_a_flood_of_output_blocks_nothing(run_dir: RunDir) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run(run_dir, "flood")
    text = str(caught.value)
    assert "line 19999" in text and "line 19970" not in text and "\x1b" not in text
    assert len(text) < 8000


@pytest.mark.parametrize("place", ["on_event", "require_wanted"])
def test_a_worker_that_is_no_longer_wanted_is_killed(run_dir: RunDir, place: str) -> None:
    """At an event, and between two events."""
    pids, cancelled = list[int](), StoppedError("cancelled", "Cancelled.")

    def on_event(event: Event) -> None:
        if isinstance(event, StartEvent):
            pids.append(event.pid)
        if place == "on_event" and isinstance(event, StepEvent):
            raise cancelled

    def require_wanted() -> None:
        if place == "require_wanted" and pids:
            raise cancelled

    command = [sys.executable, "-m", "tests.supervisor.fake_worker", "hang", str(run_dir.path)]
    with pytest.raises(StoppedError) as caught:
        run_worker(run_dir, os.environ, on_event, command, print, None, require_wanted)
    assert caught.value is cancelled and len(pids) == 1 and not psutil.pid_exists(pids[0])


# Ctrl-C


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for process in running:
        if process.poll() is None:
            kill_tree(process.pid)
        process.communicate()


def drive(run_dir: RunDir, mode: str, started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.supervisor.drive", mode, str(run_dir.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    started.append(parent)
    wait_until(lambda: run_dir.events().exists() and b'"updates": 3' in run_dir.events().read_bytes())
    time.sleep(0.3)  # the parent reads at least once more
    return parent


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@posix
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_gracefully(run_dir: RunDir, started: list[Any], signum: int) -> None:
    parent = drive(run_dir, "until-stopped", started)
    parent.send_signal(signum)
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130, output
    assert says(output, "supervisor/finishing-the-step-and-saving") and "Traceback" not in output


@posix
def test_ctrl_c_in_a_terminal_hits_the_parent_alone(run_dir: RunDir, started: list[Any]) -> None:
    parent = drive(run_dir, "until-stopped", started)
    os.killpg(parent.pid, signal.SIGINT)  # a terminal signals the whole foreground group
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130, output
    assert b'"reason": "stopped"' in run_dir.events().read_bytes()


@posix
def test_the_second_signal_kills_the_tree(run_dir: RunDir, started: list[Any]) -> None:
    parent = drive(run_dir, "deaf", started)
    grandchild = psutil.Process(int((run_dir.path / "grandchild").read_text(encoding="utf-8")))
    parent.send_signal(signal.SIGINT)
    wait_until(run_dir.stop.exists)
    time.sleep(0.3)
    assert parent.poll() is None and grandchild.is_running()
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130, output
    assert says(output, "supervisor/ended-at-once-there-is-no-checkpoint")
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


@posix
def test_the_worker_leaves_when_the_parent_is_killed(run_dir: RunDir, started: list[Any]) -> None:
    parent = drive(run_dir, "until-stopped", started)
    (worker,) = [child for child in psutil.Process(parent.pid).children() if "fake_worker" in " ".join(child.cmdline())]
    parent.kill()
    gone, alive = psutil.wait_procs([worker], timeout=WAIT_S)
    assert gone and not alive


@posix
@pytest.mark.parametrize("by_group", [True, False])
def test_a_grandchild_without_a_parent_is_found_by_its_group(
    run_dir: RunDir, started: list[Any], monkeypatch: pytest.MonkeyPatch, by_group: bool
) -> None:
    """The control: psutil's view of the tree alone does not find it."""
    command = [sys.executable, "-m", "tests.supervisor.fake_worker", "hang-deaf", str(run_dir.path)]
    worker = subprocess.Popen(command, **own_group())
    started.append(worker)
    file = run_dir.path / "grandchild"
    wait_until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    grandchild = psutil.Process(int(file.read_bytes()))
    with monkeypatch.context() as patch:
        if not by_group:
            patch.setattr("lora_rocm.processes.process.kill_group", lambda pid, job: None)
        assert kill_tree(worker.pid)
    assert worker.wait(WAIT_S) == -signal.SIGKILL

    def gone() -> bool:
        return not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE

    if by_group:
        wait_until(gone)  # nobody waits for it: it may need a moment
    else:
        assert not gone()
        grandchild.kill()


# words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, worded("supervisor/exit-code-1")),
        (-9, worded("supervisor/sigkill")),
        (-250, worded("supervisor/signal-250")),
        (0xC0000005, worded("supervisor/0xc0000005-access-violation")),
        (-1073741819 & 0xFFFFFFFF, worded("supervisor/access-violation")),
        (0xC0001234, worded("supervisor/crashed-with-code-0xc0001234")),
    ],
)
def test_describe_exit(code: int, words: Worded) -> None:
    assert says(describe_exit(code), words)
    assert says(worker_died_error("It", code, b""), "no_torch/without-saying-why")


def test_worker_command(run_dir: RunDir) -> None:
    own = ["-P", "-m", "lora_rocm.processes.child_main", "lora_rocm.train.worker", str(run_dir.path)]
    assert worker_command(run_dir)[1:] == own
    assert worker_command(run_dir, Path("x"), True)[6:] == ["--checkpoint", "x", "--accept-changes"]
    assert worker_command(run_dir, worker="another.module")[4:] == ["another.module", str(run_dir.path)]
    assert worker_command(run_dir, None, False, 2, {"step": 9.5})[6:] == [
        "--attempt",
        "2",
        "--stacks-after",
        '{"step": 9.5}',
    ]


def test_advice_names_resume_only_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    advice = resume_advice("Run the same command with --resume latest. If it comes again, run lora-rocm doctor.")
    run_dir = RunDir(tmp_path).create()
    said = ErrorEvent(**MachineError("internal", "It failed.", **advice).to_event())
    plain = MachineError("internal", "It failed.", fix=advice["fix"])  # no field for the other case
    assert with_fitting_fix(error_from_event(said), run_dir).fix == advice["fix_without_checkpoint"]
    assert "--resume" not in advice["fix_without_checkpoint"] and says(
        advice["fix_without_checkpoint"], "supervisor/run-the-same-command-if"
    )
    assert with_fitting_fix(plain, run_dir).fix == advice["fix"]
    run_dir.checkpoint(5).mkdir(parents=True)
    assert with_fitting_fix(error_from_event(said), run_dir).fix == advice["fix"]


def test_an_error_of_before_the_second_advice_is_read(tmp_path: Path) -> None:
    fields = MachineError("internal", "It failed.", fix="Go on.").to_event()
    del fields["fix_without_checkpoint"]
    error = error_from_event(ErrorEvent.read({"type": "error", **fields}))
    assert (error.fix, error.fix_without_checkpoint) == ("Go on.", "")
    assert with_fitting_fix(error, RunDir(tmp_path).create()).fix == "Go on."
