"""Locks of a run directory, and the worker that an earlier parent left behind: real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lora_rocm.errors import ResumeError, WorkerHungError
from lora_rocm.processes.process import kill_tree
from lora_rocm.rundir.events import EventWriter
from lora_rocm.rundir.heartbeat import HeartbeatWriter
from lora_rocm.rundir.held_locks import is_running
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import lock
from lora_rocm.supervisor.lock import end_leftover, locked
from tests.supervisor.fake_run import event, start_fields
from tests.wording import says

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
GRACE_S = 0.3
HOLD = """
import sys, time
from pathlib import Path
from filelock import FileLock
from lora_rocm.rundir.heartbeat import HeartbeatWriter
from lora_rocm.rundir.layout import RunDir
run_dir = RunDir(Path(sys.argv[-1]))
with FileLock(run_dir.worker_lock):
    HeartbeatWriter(run_dir.heartbeat()).beat("step")
    print("in", flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return RunDir(tmp_path / "a run \u2713").create()


@pytest.fixture
def holders() -> Iterator[list[subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        kill_tree(process.pid)
        process.communicate()


def hold(run_dir: RunDir, holders: list[subprocess.Popen[bytes]], seconds: float, *words: str) -> int:
    """A process that holds the worker's lock; ``words`` stand before the directory on its command line."""
    command = [sys.executable, "-c", HOLD, str(seconds), *words, str(run_dir.path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    holders.append(holder)
    assert holder.stdout is not None and holder.stdout.readline().strip() == b"in"
    return holder.pid


def test_a_second_parent_is_refused(run_dir: RunDir) -> None:
    script = "import sys,time; from pathlib import Path; from lora_rocm.supervisor.lock import locked; "
    script += (
        "from lora_rocm.rundir.layout import RunDir\nwith locked(RunDir(Path(sys.argv[1]))): print('in', flush=True); "
    )
    script += "sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline().strip() == b"in"
        assert is_running(run_dir)
        with pytest.raises(ResumeError, match="Another lora-rocm"), locked(run_dir):
            pass
    finally:
        holder.communicate(timeout=WAIT_S)
    assert not is_running(run_dir)
    with locked(run_dir):
        pass


def test_nothing_runs_where_nothing_was_locked(tmp_path: Path) -> None:
    assert not is_running(RunDir(tmp_path))


# a worker that was left behind


def test_where_nobody_holds_the_directory_nothing_is_waited_for(run_dir: RunDir) -> None:
    end_leftover(run_dir, pytest.fail, GRACE_S)
    with lock.FileLock(run_dir.worker_lock):
        pass
    end_leftover(run_dir, pytest.fail, GRACE_S)


def test_a_worker_that_leaves_by_itself_is_waited_for(
    run_dir: RunDir, holders: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(run_dir, holders, 0.5, "-m", "lora_rocm.train.worker")
    monkeypatch.setattr(lock, "kill_tree", lambda pid: pytest.fail("killed"))
    said: list[str] = []
    end_leftover(run_dir, said.append, WAIT_S)
    assert len(said) == 1 and says(said[0], "supervisor/save-and-leave")


@pytest.mark.parametrize("named_by", ["start event", "heartbeat"])
def test_a_worker_that_does_not_leave_is_ended(
    run_dir: RunDir, holders: list[subprocess.Popen[bytes]], named_by: str
) -> None:
    pid = hold(run_dir, holders, 60, "-m", "lora_rocm.train.worker")
    if named_by == "start event":
        writer = EventWriter(run_dir.events())
        writer.write(event("start", **start_fields(pid=pid)))
        writer.close()
        HeartbeatWriter(run_dir.heartbeat()).close()
    said: list[str] = []
    end_leftover(run_dir, said.append, GRACE_S)
    assert str(pid) in said[1] and holders[0].wait(WAIT_S) != 0
    assert not is_running(run_dir)


@pytest.mark.parametrize("words", [("-m", "somebody.else"), ("-m", "lora_rocm.train.worker", "/another/run")])
def test_another_process_with_that_number_is_left_alone(
    run_dir: RunDir, holders: list[subprocess.Popen[bytes]], words: tuple[str, ...]
) -> None:
    pid = hold(run_dir, holders, 60, *words)
    with pytest.raises(ResumeError) as caught:
        end_leftover(run_dir, lambda text: None, GRACE_S)
    assert caught.value.code == "run-dir-in-use" and psutil.pid_exists(pid) and holders[0].poll() is None


def test_a_worker_of_another_module_is_ended_where_it_is_named(
    run_dir: RunDir, holders: list[subprocess.Popen[bytes]]
) -> None:
    hold(run_dir, holders, 60, "-m", "somebody.else")
    end_leftover(run_dir, lambda text: None, GRACE_S, "somebody.else")
    assert holders[0].wait(WAIT_S) != 0 and not is_running(run_dir)


def test_one_that_cannot_be_ended_is_said(
    run_dir: RunDir, holders: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = hold(run_dir, holders, 60, "-m", "lora_rocm.train.worker")
    monkeypatch.setattr(lock, "kill_tree", lambda pid: False)
    with pytest.raises(WorkerHungError, match=f"process {pid}.*driver") as caught:
        end_leftover(run_dir, lambda text: None, GRACE_S)
    assert caught.value.code == "worker-unkillable"
