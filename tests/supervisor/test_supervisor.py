"""The supervisor over real children that hang, die, spin, flood their log, and come back."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_rocm.commands.status import status
from lora_rocm.errors import GaveUpError, MachineError, StoppedError, StorageError, WorkerHungError
from lora_rocm.hardware.settings import settings_from
from lora_rocm.processes import process
from lora_rocm.report.report import write_report
from lora_rocm.rules.kernel_log import ClockReading, patterns
from lora_rocm.rundir.event_types import Event
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import hang_detection, restart_policy, worker_process
from lora_rocm.supervisor import supervisor as supervise
from tests.event_lines import read_events
from tests.supervisor.fake_run import refused
from tests.supervisor.supervised import ROOT, supervisor
from tests.wording import saying, says, worded

SHORT = ("timeouts.first_step=1", "timeouts.step=1")
WAIT_S = 120.0  # for events that come at once on an idle machine
AMD = "linux-rx7900xtx"
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals between processes")


class Run:
    """One supervised command over the fake worker, and its result."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder / "a run \u2713").create()
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.kept: list[tuple[str, ...]] = []

    def __call__(self, mode: str, *overrides: str, **options: Any) -> int:
        options = {"keep": lambda situation, changes, seen: self.kept.append((*changes, seen)), **options}
        self.supervisor = supervisor(self.run_dir, mode, overrides, self._heard, self.said.append, **options)
        return self.supervisor.run()

    def _heard(self, event: Event) -> None:
        self.events.append(event.to_json())

    def of(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == event_type]

    def started(self) -> list[dict[str, Any]]:
        """Options and environment of each start of the worker."""
        return [json.loads(line) for line in (self.run_dir.path / "started").read_text(encoding="utf-8").splitlines()]

    def written(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run_dir.events("supervisor")) if event["type"] == event_type]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for path in map(run.run_dir.events, range(3)):
        assert not path.exists() or refused(path) == [], "a reader passes over this"


def test_a_run_that_needs_no_help_gets_none(run: Run) -> None:
    assert run("done", *SHORT) == 0
    assert not run.run_dir.events("supervisor").exists() and run.said == []


def test_patterns_of_the_kernel_log_are_read_before_a_failure(run: Run) -> None:
    patterns.cache_clear()
    assert run("done", *SHORT) == 0
    assert patterns.cache_info().currsize == 1, "afterwards the package may be out of reach"


# hangs


def test_a_worker_that_hangs_is_ended_and_started_again(run: Run) -> None:
    assert run("first:hang", *SHORT) == 0
    (failure,) = run.written("failure")
    assert (failure["seen"], failure["phase"], failure["activity"], failure["updates"]) == ("hang", "step", "step", 3)
    assert failure["code"] == "worker-hung" and failure["silent_s"] > failure["limit_s"] == 1.0
    assert failure["stacks"] == "stacks-1.txt" and failure["session"] == 1
    assert b"in silence" in run.run_dir.stacks_kept(1).read_bytes()
    (restart,) = run.written("restart")
    assert (restart["number"], restart["spent"], restart["budget"], restart["attempt"]) == (1, 1, 10, 0)
    told = [event["type"] for event in run.events if event["type"] in ("start", "failure", "restart", "end")]
    assert told == ["start", "failure", "restart", "start", "end"]
    assert all(json.loads(start["options"][-1])["step"] == 0.5 for start in run.started())


@pytest.mark.parametrize("mode", ["hang-writing", "spin", "blocks-in-c"])
def test_neither_output_nor_a_busy_processor_is_progress(run: Run, mode: str) -> None:
    assert run(f"first:{mode}", *SHORT) == 0
    (failure,) = run.written("failure")
    assert failure["seen"] == "hang"
    assert f"in {mode.replace('-', '_')}" in run.run_dir.stacks_kept(1).read_text(encoding="utf-8")


def test_a_hang_in_the_loader_takes_its_workers_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detection, "LOADER_EXTRA_S", 0.7)
    loader = ("runtime.workers=2", "runtime.workers_on_windows=true", "runtime.worker_timeout_s=0.5")
    assert run("first:loader-hang", *SHORT, *loader) == 0
    (failure,), (change,) = run.written("failure"), run.written("change")
    assert failure["seen"] == "loader-hang" and failure["limit_s"] == 1.2
    assert (change["id"], change["effect"], change["seen"]) == ("workers-0", "exact", "loader-hang")
    assert run.kept == [("workers-0", "loader-hang")]
    settings = [settings_from(start["environ"]).loader_workers for start in run.started()]
    assert settings == [None, 0]
    assert run.written("restart")[0]["changes"] == ["workers-0"]
    saved = json.loads(run.run_dir.environment.read_bytes())
    assert [row["variable"] for row in saved["settings"]] == ["setting:loader_workers"]


def test_without_a_budget_a_hang_is_an_error(run: Run) -> None:
    with pytest.raises(WorkerHungError) as caught:
        run("start-hang", "timeouts.start=1", "runtime.max_restarts=0")
    assert caught.value.code == "worker-hung" and caught.value.exit_code == 3
    assert says(str(caught.value), "supervisor/in-the-phase-start") and "timeouts.start=2" in str(caught.value)
    (failure,) = run.written("failure")
    assert failure["stacks"] is None and not run.written("restart")  # it had not come so far


def test_the_limits_that_nobody_has_set(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances four seconds at each reading, which is less than a pause of the machine."""
    monkeypatch.setattr(worker_process, "POLL_S", 0.02)
    monkeypatch.setattr(supervise, "MAX_STACKS_S", 0.0)
    clock = itertools.count(0.0, 4.0)
    assert run("first:hang", clock=lambda: next(clock)) == 0
    (failure,) = run.written("failure")
    assert failure["limit_s"] == 300.0 < failure["silent_s"] < 320.0
    assert all(json.loads(start["options"][-1])["step"] == 150 for start in run.started())


def test_whoever_has_said_the_end_and_stays_is_ended_and_has_finished(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hang_detection.LIMITS, hang_detection.LEAVING, hang_detection.Limit(0.5))
    assert run("hang-after-end") == 0
    assert not run.run_dir.events("supervisor").exists()
    (start,) = run.of("start")
    assert not psutil.pid_exists(start["pid"])


@posix
def test_what_the_worker_started_is_gone_with_it(run: Run) -> None:
    """It hears no signal, and an orphaned process belongs to it."""
    assert run("first:hang-deaf", "timeouts.step=2") == 0
    grandchild = int((run.run_dir.path / "grandchild").read_text(encoding="ascii"))
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


def test_one_that_cannot_be_ended_is_said_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[worker_process.Worker] = []
    kill = process.kill_tree
    monkeypatch.setattr(worker_process, "kill_tree", lambda pid, job=None: False)

    class Kept(worker_process.Worker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(supervise, "Worker", Kept)
    with pytest.raises(WorkerHungError) as caught:
        run("hang", *SHORT)
    said = str(caught.value)
    assert caught.value.code == "worker-unkillable" and f"process {started[0].pid}" in said and "driver" in said
    assert says(said, "supervisor/restart-the-machine") and "lora-rocm train r.yaml" in said
    assert run.written("failure")[0]["code"] == "worker-unkillable" and not run.written("restart")
    kill(started[0].pid)
    started[0]._child.wait()


# ends


def test_a_kill_needs_no_change(run: Run) -> None:
    assert run("first:killed", machine=AMD) == 0
    (failure,) = run.written("failure")
    assert failure["seen"] == "died" and not run.written("change")


def test_what_dies_again_and_again_before_its_first_word(run: Run) -> None:
    with pytest.raises(GaveUpError) as caught:
        run("start-die", "runtime.max_restarts=3", machine=AMD)
    assert caught.value.exit_code == 4 and says(str(caught.value), "supervisor/3-times-ended-without-a-word-phase")
    assert [failure["seen"] for failure in run.written("failure")] == ["died"] * 3
    assert [restart["spent"] for restart in run.written("restart")] == [1, 3]
    assert [start["environ"].get("HSA_ENABLE_SDMA") for start in run.started()] == [None, None, "0"]
    saved = json.loads(run.run_dir.environment.read_bytes())
    assert ("HSA_ENABLE_SDMA", "0") in [(row["variable"], row["value"]) for row in saved["variables"]]


def test_the_kernel_says_that_memory_ran_out(run: Run) -> None:
    def log(moment: ClockReading) -> tuple[str, ...]:
        (start,) = run.of("start")
        return (f"Out of memory: Killed process {start['pid']} (python)",)

    assert run("first:killed", read_log=log) == 0
    assert run.written("failure")[0]["seen"] == "out-of-memory" and run.written("failure")[0]["kernel_log"]
    assert [change["id"] for change in run.written("change")] == ["checkpointing"]


def test_an_error_that_a_start_may_cure(run: Run) -> None:
    assert run("first:transfer-failed", machine=AMD) == 0
    (failure,) = run.written("failure")
    assert (failure["seen"], failure["code"], failure["silent_s"]) == ("corruption", "transfer-failed", None)
    settings = [settings_from(start["environ"]).copy_method for start in run.started()]
    assert settings == ["auto", "unpinned"]


def test_a_gpu_that_is_being_reset_is_waited_for(run: Run) -> None:
    assert run("2:reset") == 0
    assert [failure["code"] for failure in run.written("failure")] == ["device-fault", "gpu-not-seen"]


def test_a_gpu_that_was_never_there_is_not(run: Run) -> None:
    with pytest.raises(MachineError) as caught:
        run("gpu-not-seen")
    assert (caught.value.code, len(run.started())) == ("gpu-not-seen", 1)


def test_between_starts_that_come_no_further_there_is_a_pause(run: Run) -> None:
    assert run("3:killed", pauses_s=(0.0, 0.5, 1.0)) == 0
    restarts, starts = run.written("restart"), run.of("start")
    waited_s = [after["time"] - before["time"] for before, after in zip(restarts, starts[1:], strict=True)]
    assert waited_s[1] >= 0.5 and waited_s[2] >= 1.0
    assert [text for text in run.said if "next start" in text] == [
        worded("supervisor/the-next-start-comes-in-0-5"),
        worded("supervisor/the-next-start-comes-in-1-s"),
    ]


def test_a_stop_in_that_pause_is_heard_at_once(run: Run) -> None:
    began = time.monotonic()

    class Stopping(list[str]):
        def append(self, text: str) -> None:
            if "next start" in text:
                run.run_dir.stop.touch()

    run.said = Stopping()
    with pytest.raises(StoppedError, check=saying("supervisor/before-one-more-start")):
        run("killed", pauses_s=(60.0,))
    assert time.monotonic() - began < 20 and len(run.started()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk")
def test_a_failure_that_cannot_be_recorded_is_told_in_words(run: Run) -> None:
    class Filling(list[dict[str, Any]]):
        def append(self, event: dict[str, Any]) -> None:
            if event["type"] == "start":
                run.run_dir.events("supervisor").symlink_to("/dev/full")

    run.events = Filling()
    with pytest.raises(StorageError) as caught:
        run("killed")
    assert (caught.value.code, caught.value.exit_code) == ("link-refused", 3)


@pytest.mark.parametrize(("mode", "code"), [("internal", "internal"), ("error", "disk-full")])
def test_other_errors_are_told_at_once(run: Run, mode: str, code: str) -> None:
    with pytest.raises(MachineError) as caught:
        run(mode)
    assert (caught.value.code, caught.value.exit_code, len(run.started())) == (code, 3, 1)
    assert not run.run_dir.events("supervisor").exists()


def test_what_does_not_fit_ends_with_its_own_words(run: Run) -> None:
    with pytest.raises(MachineError) as caught:
        run("out-of-memory")
    assert (caught.value.code, caught.value.exit_code) == ("out-of-memory", 3)
    assert [restart["changes"] for restart in run.written("restart")] == [["checkpointing"]]


def test_what_was_changed_on_the_way_may_fit_from_the_beginning(run: Run) -> None:
    assert run("first:change-then-full") == 0
    assert [settings_from(start["environ"]).checkpointing for start in run.started()] == [False, True]
    assert [restart["changes"] for restart in run.written("restart")] == [["checkpointing"]]


def test_always_the_same_failure_is_given_up(run: Run) -> None:
    with pytest.raises(GaveUpError) as caught:
        run("transfer-failed", "runtime.max_restarts=3")
    assert caught.value.exit_code == 4 and len(run.started()) == 3
    said = str(caught.value)
    assert (
        says(said, "supervisor/3-times-data-weights-or-state-had")
        and "Do so." in said
        and "lora-rocm train r.yaml" in said
    )


def test_each_checkpoint_gives_a_restart_back(run: Run) -> None:
    assert run("further,2:transfer-failed", "runtime.max_restarts=1") == 0
    restarts = run.written("restart")
    assert [restart["from_updates"] for restart in restarts] == [3, 6]
    assert [(restart["progress"], restart["spent"]) for restart in restarts] == [(True, 1)] * 2


def test_roll_backs_take_other_noise_and_end_with_the_original_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "MAX_ROLLBACKS", 1)
    with pytest.raises(GaveUpError, match="It met nonfinite") as caught:
        run("nonfinite")
    assert caught.value.exit_code == 4
    attempts = [start["options"][start["options"].index("--attempt") + 1] for start in run.started()]
    assert attempts == ["0", "1"]
    with pytest.raises(GaveUpError):  # also for the next command on this run
        run("nonfinite")
    assert len(run.started()) == 3


def test_what_the_worker_changed_itself_stays(run: Run) -> None:
    assert run("first:change-then-die", "train.batch_size=4") == 0
    assert [settings_from(start["environ"]).micro_batch_parts for start in run.started()] == [1, 2]
    assert run.kept == [("micro-batch-halved", "out-of-memory")]
    assert not run.written("change")  # the worker has reported it


def test_workers_that_the_worker_gave_up_stay_so_in_the_next_command_as_well(run: Run) -> None:
    loader = ("runtime.workers=2", "runtime.workers_on_windows=true")
    assert run("first:loader-then-die", *loader) == 0 == run("done", *loader)
    assert [settings_from(start["environ"]).loader_workers for start in run.started()] == [None, 0, 0]
    assert run.kept == [("workers-0", "loader-hang")] and not run.written("change")


# changes of the run and of the machine


def test_a_new_run_takes_what_the_machine_remembers_and_keeps_to_it(run: Run) -> None:
    assert run("done", changes=("workers-0",), machine=AMD) == 0
    (change,) = run.written("change")
    assert (change["id"], change["seen"]) == ("workers-0", "remembered") and run.kept == []
    assert run("done", changes=("sdma-off",), machine=AMD) == 0  # learnt by another run since
    assert run.supervisor.situation.changes == ("workers-0",)
    assert [start["environ"].get("HSA_ENABLE_SDMA") for start in run.started()] == [None, None]


def test_a_chosen_checkpoint_is_gone_on_from_until_newer_ones_are_gone(run: Run) -> None:
    chosen = run.run_dir.checkpoint(3)
    for mode, options in (("start-die", ["runtime.max_restarts=1"]), ("first:transfer-failed", [])):
        with suppress(GaveUpError):
            run(mode, *options, checkpoint=chosen)
    given = ["--checkpoint" in start["options"] for start in run.started()]
    assert given == [True, True, True, False]


# Ctrl-C


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for parent in running:
        process.kill_tree(parent.pid)
        parent.communicate()


def drive(run: Run, started: list[subprocess.Popen[str]], mode: str, *overrides: str) -> subprocess.Popen[str]:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.supervisor.drive", mode, str(run.run_dir.path), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    started.append(parent)
    deadline = time.monotonic() + WAIT_S
    while b'"updates": 3' not in (run.run_dir.events().read_bytes() if run.run_dir.events().exists() else b""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return parent


@posix
def test_ctrl_c_stops_gracefully(run: Run, started: list[subprocess.Popen[str]]) -> None:
    parent = drive(run, started, "until-stopped", "runtime.max_restarts=3")
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130, output
    assert says(output, "supervisor/finishing-the-step-and-saving") and len(run.started()) == 1


@posix
def test_ctrl_c_on_a_worker_that_does_not_hear_it(run: Run, started: list[subprocess.Popen[str]]) -> None:
    parent = drive(run, started, "hang-deaf", "timeouts.step=2")
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130, output
    assert says(output, "supervisor/it-did-not-stop-within-2-s")
    assert len(run.started()) == 1 and not run.written("restart")


@posix
def test_the_second_ctrl_c_ends_it_at_once(run: Run, started: list[subprocess.Popen[str]]) -> None:
    parent = drive(run, started, "hang-deaf", "runtime.max_restarts=3")
    parent.send_signal(signal.SIGINT)
    deadline = time.monotonic() + WAIT_S
    while not run.run_dir.stop.exists():  # two signals at once would be one
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGINT)
    output, _ = parent.communicate(timeout=WAIT_S)
    assert parent.returncode == 130 and says(output, "supervisor/ended-at-once"), output
    assert len(run.started()) == 1


# several ranks


def ranks_started(run: Run) -> list[tuple[str, str, str]]:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    return [tuple(start["environ"][name] for name in names) for start in run.started()]


def test_ranks_are_started_together_and_meet_at_a_port_of_their_own(run: Run) -> None:
    assert run("done", size=3) == 0
    assert sorted(start[:2] for start in ranks_started(run)) == [("0", "3"), ("1", "3"), ("2", "3")]
    assert len({port for *_, port in ranks_started(run)}) == 1
    assert all(start["environ"]["MASTER_ADDR"] == "127.0.0.1" for start in run.started())
    assert [event["type"] for event in run.events].count("start") == 1, "the user hears the first"
    assert all(read_events(run.run_dir.events(rank))[-1]["type"] == "end" for rank in range(3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_all_and_all_start_again(run: Run, rank: int) -> None:
    assert run(f"first:killed@{rank}", size=2) == 0
    (failure,) = run.written("failure")
    assert (failure["seen"], failure["code"], failure["where"]) == ("died", "worker-died", f"rank {rank}")
    assert sorted(start[0] for start in ranks_started(run)) == ["0", "0", "1", "1"]
    assert len(run.written("restart")) == 1
    assert not any(psutil.pid_exists(event["pid"]) for r in range(2) for event in starts_of(run, r))


def starts_of(run: Run, rank: int) -> list[dict[str, Any]]:
    return [event for event in read_events(run.run_dir.events(rank)) if event["type"] == "start"]


def test_the_cause_is_not_who_only_missed_another(run: Run) -> None:
    """One rank reports at once that another is gone; that one ends later, with its own reason."""

    def command(checkpoint: Path | None, attempt: int, stacks_after_s: Any) -> list[str]:
        script = "import os, subprocess, sys, time; rank = os.environ['RANK']; time.sleep(0.4 * (rank == '0')); "
        script += "mode = 'first:transfer-failed' if rank == '0' else 'first:rank-lost'; "
        script += (
            "sys.exit(subprocess.call([sys.executable, '-m', 'tests.supervisor.fake_worker', mode, *sys.argv[1:]]))"
        )
        return [sys.executable, "-c", script, str(run.run_dir.path)]

    made = supervisor(run.run_dir, "", (), run.events.append, run.said.append, size=2)
    made.command = command
    assert made.run() == 0
    (failure,) = run.written("failure")
    assert (failure["code"], failure["seen"]) == ("transfer-failed", "corruption")
    assert failure["where"] == worded("supervisor/rank-0-there")


def test_a_silent_rank_is_told_from_those_that_wait_for_it(run: Run) -> None:
    assert run("first:hang@1", *SHORT, size=2) == 0
    (failure,) = run.written("failure")
    assert (failure["seen"], failure["activity"]) == ("hang", "step") and failure["where"].startswith("rank 1, ")
    assert b"in silence" in run.run_dir.stacks_kept(1).read_bytes()


def test_what_any_rank_changed_itself_stays(run: Run) -> None:
    assert run("first:change-then-die@1", "train.batch_size=4", size=2) == 0
    assert [settings_from(start["environ"]).micro_batch_parts for start in run.started()] == [1, 1, 2, 2]
    assert run("done", "train.batch_size=4", size=2) == 0
    assert run.supervisor.situation.changes == ("micro-batch-halved",), "also for the next command on this run"
    assert status(run.run_dir).changes == ["micro-batch-halved"] and len(run.of("change")) == 1
    assert says(write_report(run.run_dir).read_text(encoding="utf-8"), "supervisor/not-its-bytes")


def test_what_all_ranks_changed_themselves_counts_once(run: Run) -> None:
    """They run out of memory together: the machine would else remember a half of a half, with each rank one more."""
    assert run("first:change-then-die", "train.batch_size=8", size=3) == 0
    assert [settings_from(start["environ"]).micro_batch_parts for start in run.started()] == [1] * 3 + [2] * 3
    assert run.kept == [("micro-batch-halved", "out-of-memory")]
    assert run("done", "train.batch_size=8", size=3) == 0
    assert run.supervisor.situation.changes == ("micro-batch-halved",), "also for the next command on this run"
    assert status(run.run_dir).changes == ["micro-batch-halved"]


def test_a_stop_is_one_for_all(run: Run) -> None:
    class Stopping(list[dict[str, Any]]):
        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["type"] == "step" and event["updates"] == 3:
                run.run_dir.stop.touch()

    run.events = Stopping()
    assert run("until-stopped", size=2) == 130
    assert all(read_events(run.run_dir.events(rank))[-1]["reason"] == "stopped" for rank in range(2))
