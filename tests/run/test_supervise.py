"""The supervisor over real children that hang, die, spin, flood their log, and come back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lora_rocm.run.events import read_events
from lora_rocm.run.layout import RunDir
from tests.run.supervised import supervisor

SHORT = ("timeouts.first_step=1", "timeouts.step=1")
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals between processes")


class Run:
    """One supervised command over the fake worker, and what came of it."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder / "a run \u2713").create()
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.kept: list[tuple[str, str]] = []

    def __call__(self, mode: str, *overrides: str, **options: Any) -> int:
        options = {"keep": lambda situation, change, seen: self.kept.append((change, seen)), **options}
        self.supervisor = supervisor(self.run_dir, mode, overrides, self.events.append, self.said.append, **options)
        return self.supervisor.run()

    def of(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == event_type]

    def written(self, event_type: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run_dir.events("supervisor")) if event["type"] == event_type]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_run_that_needs_no_help_gets_none(run: Run) -> None:
    assert run("done", *SHORT) == 0
    assert not run.run_dir.events("supervisor").exists() and run.said == []


def test_a_worker_that_hangs_is_ended_and_started_again(run: Run) -> None:
    assert run("first:hang", *SHORT) == 0
    (failure,) = run.written("failure")
    assert (failure["seen"], failure["phase"], failure["activity"], failure["updates"]) == ("hang", "step", "step", 3)
    assert failure["code"] == "worker-hung" and failure["silent_s"] > failure["limit_s"] == 1.0
    assert failure["stacks"] == "stacks-1.txt" and failure["session"] == 1
    assert b"in silence" in run.run_dir.stacks_kept(1).read_bytes()
    (restart,) = run.written("restart")
    assert (restart["number"], restart["spent"], restart["budget"], restart["attempt"]) == (1, 1, 10, 0)
    assert [event["type"] for event in run.events if event["type"] in ("failure", "restart", "end")] == [
        "failure", "restart", "end",
    ]  # fmt: skip
