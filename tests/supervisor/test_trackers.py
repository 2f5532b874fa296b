"""The parent's side of trackers: it never waits for them, and names one that ended, once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lora_rocm.errors import MachineError
from lora_rocm.processes.jobs import CHILDREN, TrackJob, job_of
from lora_rocm.recipe.output_section import OutputSection
from lora_rocm.rundir.layout import RunDir
from lora_rocm.supervisor import trackers
from tests.supervisor.fake_run import event
from tests.supervisor.wire import step_fields
from tests.wording import saying, worded

ERROR = event("error", **MachineError("tracker-failed", "wandb gets no more numbers.", fix="Look.").to_event())
ONE = OutputSection(log_with=("wandb",), log_project="dogs")
ENVIRON = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "HERE": "x"}


def started(
    run_dir: RunDir, script: str, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> tuple[trackers.Trackers, subprocess.Popen[bytes], list[str]]:
    commands: list[str] = []

    def command(module: str, *arguments: str, reads_input: bool = False) -> list[str]:
        assert reads_input  # it sends what is waiting before it leaves
        commands.extend((module, *arguments))
        return [sys.executable, "-c", script]

    monkeypatch.setattr(trackers, "heavy_command", command)
    found = trackers.Trackers(run_dir, ONE, said.append, ENVIRON)
    found.__enter__()
    (child, _) = found._running["wandb"]
    return found, child, commands


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def test_one_that_failed_is_named_once_and_the_events_go_on(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    heard: list[str] = []
    line = json.dumps(ERROR.to_json())
    found, child, _ = started(run_dir, f"import sys; print({line!r}); sys.exit(5)", monkeypatch, said)
    child.wait(60)
    on_event = found.passing(lambda event: heard.append(event.type))
    for _ in range(3):
        on_event(event("step", **step_fields(1)))
    found.__exit__(None, None, None)
    assert said == [worded("supervisor/wandb-gets-no-more-numbers-look")] and heard == ["step"] * 3
    found, child, _ = started(run_dir, "import sys; sys.exit(5)", monkeypatch, said)  # it dies silently
    child.wait(60)
    found.__exit__(None, None, None)
    assert said[1:] == [worded("supervisor/wandb-ended-with-exit-code-5-and")]


def test_nobody_waits_for_one_that_hangs(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    found, child, _ = started(run_dir, "import time; time.sleep(600)", monkeypatch, said)
    found.passing(lambda event: None)(event("step", **step_fields(1)))
    found.__exit__(None, None, None)
    assert child.poll() is None and said == []
    child.kill()
    child.wait(60)


def test_one_that_works_ends_after_the_run_and_knows_no_gpu_and_no_rank(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.events().write_text("12345\n", encoding="utf-8")
    script = "import os, sys; sys.stdin.read(); print([os.environ.get(n) for n in sys.argv[1:] or %r])"
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "HERE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    said: list[str] = []
    found, child, command = started(run_dir, script % names, monkeypatch, said)
    module, argument = command
    assert module == CHILDREN["track"].module
    monkeypatch.setattr(sys, "argv", ["x", argument])
    assert job_of(TrackJob) == TrackJob(run_dir=run_dir.path, tracker="wandb", project="dogs", offset=6)
    found.__exit__(None, None, None)
    assert child.wait(60) == 0 and said == []
    assert "[None, None, None, 'x', '-1', '-1']" in run_dir.tracker_log("wandb").read_text(encoding="utf-8")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    (error,) = trackers.missing_trackers(ONE)
    says = ("supervisor/wandb-is-not-installed", "supervisor/output-log-with-wandb", "supervisor/m-pip-install-wandb")
    assert error.code == "tracker-missing" and saying(*says)(error)
    assert trackers.missing_trackers(OutputSection()) == []
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    assert trackers.missing_trackers(ONE) == []
